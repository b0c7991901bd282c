"""Sandboxes of command-line clients that start, enter and remove a container."""

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, ClassVar

from trajkit_rollout.agents import sandbox
from trajkit_rollout.agents.sandbox import (
    Command,
    CommandResult,
    SandboxError,
    remove,
    run_here,
)

# an image may have to be fetched, and converted
_START = Command(arguments=(), timeout_s=1800.0)
_STOP = Command(arguments=(), timeout_s=60.0)
# name of the host machine inside a container that does not use the host's network
_HOST = "host.docker.internal"


class ContainerSandbox(sandbox.ForeignSandbox):
    """A container. ``options["binary"]`` names the client.

    A kind states the client's arguments, in which fields in braces are replaced.
    """

    building: ClassVar[str] = ""  # makes its image from a folder
    starting: ClassVar[str]  # creates the container
    entering: ClassVar[str]  # before the arguments of a command
    removing: ClassVar[str]
    # writes the arguments of a limit, by its field of `Limits`
    limits: ClassVar[Mapping[str, Callable[[Any], str]]]
    # how the client's last line starts if it did not run the command
    refusals: ClassVar[tuple[str, ...]]
    # what the client puts before the names of variables that it passes on
    env_prefix: ClassVar[str] = ""
    hosts: str = ""  # arguments that name this machine

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        if spec.image is None:
            raise SandboxError(f"a sandbox of kind {self.kind} needs an image")
        binary = self.chosen["binary"]
        self._binary = shutil.which(binary) or ""
        if not self._binary:
            raise SandboxError(f"{binary} is not installed (not found on PATH)")
        self._started = False
        # for kinds that keep written files on this machine
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"

    def start(self) -> None:
        # one that a killed run left
        self._client(self.removing, _STOP)
        remove(self._overlay)
        self._overlay.mkdir(parents=True)
        if self.spec.build is not None:
            if not self.building:
                rule = f"a sandbox of kind {self.kind} cannot build an image"
                raise SandboxError(f"build = {self.spec.build!r}: {rule}")
            done = self._client(self.building, _START, self._check)
            if done.code != 0:
                message = f"{self.spec.build}: cannot be built: {done.summary}"
                raise SandboxError(message)
        done = self._client(self.starting, _START, self._check)
        if done.code != 0:
            message = f"{self.spec.image}: cannot be started: {done.summary}"
            raise SandboxError(message)
        self._started = True
        self._make_directories()

    def _enter(self, command: Command) -> CommandResult:
        done = self._client(self.entering, command, self._check)
        if done.code and done.last_line.startswith(self.refusals):
            raise SandboxError(f"{self.spec.name}: {done.last_line}")
        return done

    def _remove(self) -> None:
        try:
            done = self._client(self.removing, _STOP)
        finally:
            with suppress(OSError):
                remove(self._overlay)
        # a container that was not started may be missing
        if done.code != 0 and self._started:
            message = f"{self.spec.name}: cannot be removed: {done.summary}"
            raise SandboxError(message)
        self._started = False

    def _client(
        self, words: str, command: Command, check: sandbox.Check = lambda _: None
    ) -> CommandResult:
        """Run the client with these arguments and those of a command."""
        limits = asdict(self.spec.limits).items()
        values = {
            **self.chosen,
            "name": self.spec.name,
            "image": str(self.spec.image),
            "build": str(self.spec.build),
            "overlay": str(self._overlay),
            "cwd": command.cwd,
        }
        filled = words.format(
            hosts=self.hosts,
            limits=" ".join(self.limits[k](v) for k, v in limits if v is not None),
            variables=" ".join(f"--env {shlex.quote(name)}" for name in command.env),
            **{name: shlex.quote(value) for name, value in values.items()},
        )
        arguments = (self._binary, *shlex.split(filled), *command.arguments)
        # the client reads the values from its environment: no process list shows them
        env = {self.env_prefix + name: value for name, value in command.env.items()}
        env = {**os.environ, **env}
        return run_here(replace(command, arguments=arguments, env=env), check)


class DockerSandbox(ContainerSandbox):
    """A container of Docker, or of a client with the same commands.

    ``options["binary"]`` is the client (``docker`` or ``podman``). ``options["network"]``
    is the container's network, by default ``host``, where the container shares the
    gateway's loopback address. With another one the gateway must listen on an address
    that the container can reach as ``host.docker.internal``.
    """

    kind = "docker"
    options: ClassVar = {"binary": "docker", "network": "host"}
    building = "build --quiet --tag {image} {build}"
    starting = (
        "run --detach --name {name} --network {network} {hosts} {limits} "
        "--init --entrypoint sleep {image} infinity"
    )
    entering = "exec --interactive {variables} --workdir {cwd} {name}"
    removing = "rm --force --volumes {name}"
    limits: ClassVar = {
        "memory_mb": "--memory {}m".format,
        "cpus": "--cpus {:g}".format,
        "processes": "--pids-limit {}".format,
        "file_mb": lambda mb: f"--ulimit fsize={mb << 20}",
    }
    refusals = ("Error response from daemon", "Error: No such", "Cannot connect to")

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        self._shares_network = self.chosen["network"] == "host"
        if self._shares_network:
            self.exposes = sandbox.SHARED_NETWORK
        else:
            self.hosts = f"--add-host {_HOST}:host-gateway"

    def map_url(self, url: str) -> str:
        """Return the URL with the name of the host, unless the network is the host's."""
        if self.spec.gateway is not None or self._shares_network:
            return super().map_url(url)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{_HOST}:{rest.rpartition(':')[2]}"


class ApptainerSandbox(ContainerSandbox):
    """An instance of Apptainer, which clusters have, on this machine's network.

    The image is a file or a URI. Written files go to an overlay below the scratch
    directory. ``options["binary"]`` is ``apptainer`` or ``singularity``.
    """

    kind = "apptainer"
    options: ClassVar = {"binary": "apptainer"}
    starting = (
        "instance start --containall --cleanenv --overlay {overlay} {limits} "
        "{image} {name}"
    )
    entering = "exec --cleanenv --pwd {cwd} instance://{name}"
    removing = "instance stop --force {name}"
    limits: ClassVar = {
        "memory_mb": "--memory {}M".format,
        "cpus": "--cpus {:g}".format,
        "processes": "--pids-limit {}".format,
    }
    refusals = ("FATAL:",)
    env_prefix = "APPTAINERENV_"
    exposes = sandbox.SHARED_NETWORK
