"""Sandboxes whose processes this one cannot end itself: containers, and those of E2B.

A kind of container states the arguments of its command-line client.
"""

import importlib
import math
import os
import secrets
import shlex
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from trajkit_rollout import sandbox
from trajkit_rollout.local import LocalSandbox
from trajkit_rollout.sandbox import (
    MARK,
    TAIL_BYTES,
    Command,
    CommandResult,
    Sandbox,
    SandboxError,
    pack,
    remove,
    run_here,
)

# an image may have to be fetched, and converted
_START = Command(arguments=(), timeout_s=1800.0)
_STOP = Command(arguments=(), timeout_s=60.0)
# name of the host machine inside a container that does not use the host's network
_HOST = "host.docker.internal"
# some container clients set HOME themselves and do not accept another one from outside
_SCRIPT = (
    'PATH="$1$PATH" HOME=/home TMPDIR=/tmp; export PATH HOME TMPDIR; shift; exec "$@"'
)
# kills the processes with a mark again and again, until it finds no more
_KILL = (
    "found=1; while test $found; do found=; for each in /proc/[0-9]*; do "
    "tr '\\0' '\\n' < $each/environ 2> /dev/null | "
    'grep -qxF "$0" && kill -9 ${each#/proc/} && found=1; done; done; true'
)


class RemoteSandbox(Sandbox):
    """A sandbox whose processes end by a command in it."""

    def _run(self, command: Command) -> CommandResult:
        """Run one command, and end its processes if it takes too long."""
        first = "".join(f"{folder}:" for folder in self.spec.path)
        wrapped = ("sh", "-c", _SCRIPT, "sh", first, *command.arguments)
        done = self._enter(replace(command, arguments=wrapped))
        if done.code is None:
            kill = ("sh", "-c", _KILL, f"{MARK}={command.env[MARK]}")
            self._enter(replace(_STOP, arguments=kill))
        return done

    @abstractmethod
    def _enter(self, command: Command) -> CommandResult:
        """Run one command, whose processes may continue after its timeout."""

    def _make_folders(self) -> None:
        for folder in ("/home", "/tmp", "/work"):
            self.put(pack({}), folder)


class ContainerSandbox(RemoteSandbox):
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
        if spec.build is not None and not self.building:
            rule = f"a sandbox of kind {self.kind} cannot build an image"
            raise SandboxError(f"build = {spec.build!r}: {rule}")
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
        build = (self.building,) if self.spec.build is not None else ()
        for words in (*build, self.starting):
            done = self._client(words, _START, self._check)
            if done.code != 0:
                rule = f"the client cannot {words.split()[0]}: {done.summary}"
                raise SandboxError(f"{self.spec.image}: {rule}")
        self._started = True
        self._make_folders()

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
        self, words: str, command: Command, check: Callable[[], None] = lambda: None
    ) -> CommandResult:
        """Run the client with these arguments and those of a command."""
        spec, limits = self.spec, asdict(self.spec.limits).items()
        own = {"name": spec.name, "image": spec.image, "build": spec.build}
        values = {**self.chosen, **own, "overlay": self._overlay, "cwd": command.cwd}
        filled = words.format(
            hosts=self.hosts,
            limits=" ".join(self.limits[k](v) for k, v in limits if v is not None),
            variables=" ".join(f"--env {shlex.quote(name)}" for name in command.env),
            **{name: shlex.quote(str(value)) for name, value in values.items()},
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
        if self.chosen["network"] == "host":
            self.exposes = sandbox.SHARED_NETWORK
        else:
            self.hosts = f"--add-host {_HOST}:host-gateway"

    def map_url(self, url: str) -> str:
        """Return the URL with the name of the host, unless the network is the host's."""
        if self.spec.gateway is not None or not self.hosts:
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


class E2BSandbox(RemoteSandbox):
    """A sandbox of E2B, in its cloud or on a private cluster, by its Python package.

    The gateway must be reachable from there, so its URL is required. The image is an E2B
    template; None: E2B's base. ``options["lifetime"]`` is the number of seconds after
    which E2B ends a sandbox that was not stopped. Their package reads its key from
    ``E2B_API_KEY``.
    """

    kind = "e2b"
    options: ClassVar = {"lifetime": "7200"}

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        if spec.gateway is None:
            rule = "give the URL by which it reaches the gateway"
            raise SandboxError(f"an E2B sandbox cannot reach this machine: {rule}")
        if find_spec("e2b") is None:
            raise SandboxError("e2b is not installed: pip install e2b")
        lifetime = self.chosen["lifetime"]
        if not lifetime.isdecimal() or int(lifetime) < 1:
            raise SandboxError(f"lifetime = {lifetime!r} is not a number of seconds")
        # an optional package whose types are not available to type checkers
        self._e2b: Any = importlib.import_module("e2b")
        self._box: Any = None

    def start(self) -> None:
        with _failures():
            self._box = self._e2b.Sandbox.create(
                template=self.spec.image,
                timeout=int(self.chosen["lifetime"]),
                metadata={MARK: self.spec.name},
            )
        self._make_folders()

    def _enter(self, command: Command) -> CommandResult:
        # `stop` may take it away at any time
        box, root = self._box, {"user": "root"}
        if box is None:
            raise SandboxError("the sandbox was stopped")
        # through files: the package decodes the streams of a command as text
        token = secrets.token_hex(8)
        given, out, err = (f"/tmp/.{token}.{name}" for name in ("in", "out", "err"))
        to = "&1" if command.log is not None else err
        script = f"exec {shlex.join(command.arguments)} < {given} > {out} 2>{to}"
        script = f"cd {shlex.quote(command.cwd)} && {script}"
        seconds = math.ceil(command.timeout_s)
        texts = [b"", b""]
        try:
            with _failures():
                box.files.write(given, command.stdin, **root)
                try:
                    started = {"envs": dict(command.env), "timeout": seconds, **root}
                    code = int(box.commands.run(script, **started).exit_code)
                except self._e2b.TimeoutException:
                    code = None
                except self._e2b.CommandExitException as error:
                    code = int(error.exit_code)
                for k, path in enumerate([out, err][: 1 if command.log else 2]):
                    texts[k] = bytes(box.files.read(path, format="bytes", **root))
        finally:
            with suppress(Exception):
                box.commands.run(f"rm -f {given} {out} {err}", **root)
        if command.log is not None:
            command.log.write_bytes(texts[0])
            texts[0] = texts[0][-TAIL_BYTES:]
        return CommandResult(code, *texts)

    def _remove(self) -> None:
        # its lifetime may have ended
        with _failures(), suppress(self._e2b.NotFoundException):
            if self._box is not None:
                self._box.kill()
        self._box = None


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what the package raises, its own errors and those of HTTP, into ours."""
    try:
        yield
    except Exception as error:
        raise SandboxError(f"e2b: {error}") from error


SANDBOXES: Mapping[str, type[Sandbox]] = {
    kind.kind: kind
    for kind in (ApptainerSandbox, DockerSandbox, E2BSandbox, LocalSandbox)
}
"""The kinds of sandbox by name."""
