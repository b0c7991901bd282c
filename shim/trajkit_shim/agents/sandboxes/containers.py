"""Sandboxes of command-line clients that start, enter and remove a container."""

import os
import shutil
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from trajkit_shim.agents import sandbox
from trajkit_shim.agents.processes import Processes
from trajkit_shim.agents.sandbox import Command, CommandResult, SandboxError

# an image may have to be fetched, and converted
_START_SECONDS = 1800.0
_STOP_SECONDS = 60.0
# name of the host machine inside a container that does not use the host's network
_HOST = "host.docker.internal"


class ContainerSandbox(sandbox.ForeignSandbox):
    """A container. ``options["binary"]`` names the client."""

    needs_image = True
    # how the client's last line starts if it did not run the command
    refusals: ClassVar[tuple[str, ...]]
    # what the client puts before the names of variables that it passes on
    env_prefix: ClassVar[str] = ""
    memory_unit: ClassVar[str]

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        binary = spec.options.get("binary", self.kind)
        found = shutil.which(binary)
        if found is None:
            raise SandboxError(f"{binary} is not installed (not found on PATH)")
        self._binary = found
        self._processes = Processes()
        self._started = False

    @abstractmethod
    def _start_arguments(self, limits: list[str]) -> list[str]:
        """The client's arguments that create the container."""

    @abstractmethod
    def _exec_arguments(self, command: Command) -> list[str]:
        """The client's arguments before those of a command."""

    @abstractmethod
    def _remove_arguments(self) -> list[str]: ...

    def start(self) -> None:
        # one that a killed run left
        self._client(self._processes, self._remove_arguments(), _STOP_SECONDS)
        limits = self.spec.limits
        options = {
            "--memory": limits.memory_mb and f"{limits.memory_mb}{self.memory_unit}",
            "--cpus": limits.cpus and f"{limits.cpus:g}",
            "--pids-limit": limits.processes and str(limits.processes),
        }
        given = [part for pair in options.items() if pair[1] for part in map(str, pair)]
        arguments = self._start_arguments(given)
        done = self._client(self._processes, arguments, _START_SECONDS)
        if done.code != 0:
            message = f"{self.spec.image}: cannot be started: {done.summary}"
            raise SandboxError(message)
        self._started = True
        self._make_directories()

    def _enter(self, command: Command) -> CommandResult:
        arguments = (self._binary, *self._exec_arguments(command), *command.arguments)
        # the client reads the values from its environment: no process list shows them
        env = {self.env_prefix + name: value for name, value in command.env.items()}
        done = self._processes.run(
            replace(command, arguments=arguments), {**os.environ, **env}
        )
        if done.code and done.last_line.startswith(self.refusals):
            raise SandboxError(f"{self.spec.name}: {done.last_line}")
        return done

    def _end_commands(self) -> None:
        self._processes.end()

    def _remove(self) -> None:
        done = self._client(Processes(), self._remove_arguments(), _STOP_SECONDS)
        # a container that was not started may be missing
        if done.code != 0 and self._started:
            message = f"{self.spec.name}: cannot be removed: {done.summary}"
            raise SandboxError(message)
        self._started = False

    def _client(
        self, processes: Processes, arguments: list[str], timeout_s: float
    ) -> CommandResult:
        command = Command(arguments=(self._binary, *arguments), timeout_s=timeout_s)
        return processes.run(command, os.environ)


class DockerSandbox(ContainerSandbox):
    """A container of Docker, or of a client with the same commands.

    ``options["binary"]`` is the client (``docker`` or ``podman``). ``options["network"]``
    is the container's network, by default ``host``, where the container shares the
    gateway's loopback address. With another one the gateway must listen on an address
    that the container can reach as ``host.docker.internal``.
    """

    kind = "docker"
    options = ("binary", "network")
    not_enforced = ("disk_mb",)
    refusals = ("Error response from daemon", "Error: No such", "Cannot connect to")
    memory_unit = "m"

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        self._network = spec.options.get("network", "host")

    @property
    def exposes(self) -> str | None:
        """The network, if it is this machine's."""
        return sandbox.SHARED_NETWORK if self._network == "host" else None

    def map_url(self, url: str) -> str:
        """Return the URL with the name of the host, unless the network is the host's."""
        if self.spec.gateway is not None or self._network == "host":
            return super().map_url(url)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{_HOST}:{rest.rpartition(':')[2]}"

    def _start_arguments(self, limits: list[str]) -> list[str]:
        options = ["--name", self.spec.name, "--network", self._network]
        if self._network != "host":
            options += ["--add-host", f"{_HOST}:host-gateway"]
        options += limits
        if self.spec.limits.file_mb is not None:
            options += ["--ulimit", f"fsize={self.spec.limits.file_mb << 20}"]
        options += ["--env", f"{sandbox.MARK}={self.spec.name}", "--init"]
        options += ["--entrypoint", "sleep", str(self.spec.image), "infinity"]
        return ["run", "--detach", *options]

    def _exec_arguments(self, command: Command) -> list[str]:
        named = [part for name in command.env for part in ("--env", name)]
        where = ["--workdir", command.cwd]
        return ["exec", "--interactive", *named, *where, self.spec.name]

    def _remove_arguments(self) -> list[str]:
        return ["rm", "--force", "--volumes", self.spec.name]


class ApptainerSandbox(ContainerSandbox):
    """An instance of Apptainer, which clusters have, on this machine's network.

    The image is a file or a URI. Written files go to an overlay below the scratch
    directory. ``options["binary"]`` is ``apptainer`` or ``singularity``.
    """

    kind = "apptainer"
    options = ("binary",)
    not_enforced = ("file_mb", "disk_mb")
    refusals = ("FATAL:",)
    env_prefix = "APPTAINERENV_"
    memory_unit = "M"
    exposes = sandbox.SHARED_NETWORK

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"

    def _start_arguments(self, limits: list[str]) -> list[str]:
        shutil.rmtree(self._overlay, ignore_errors=True)
        self._overlay.mkdir(parents=True)
        options = ["--containall", "--cleanenv", "--overlay", str(self._overlay)]
        return [
            *("instance", "start", *options, *limits),
            *(str(self.spec.image), self.spec.name),
        ]

    def _exec_arguments(self, command: Command) -> list[str]:
        where = ["--pwd", command.cwd, f"instance://{self.spec.name}"]
        return ["exec", "--cleanenv", *where]

    def _remove_arguments(self) -> list[str]:
        return ["instance", "stop", "--force", self.spec.name]

    def _remove(self) -> None:
        try:
            super()._remove()
        finally:
            shutil.rmtree(self._overlay, ignore_errors=True)
