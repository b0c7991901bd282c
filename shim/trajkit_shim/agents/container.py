"""What the sandboxes of container clients (Docker, Apptainer) have in common."""

import os
import shutil
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from trajkit_shim.agents import sandbox
from trajkit_shim.agents.processes import Processes
from trajkit_shim.agents.sandbox import Command, CommandResult, SandboxError

# an image may have to be fetched, and converted
_START = Command(arguments=(), timeout_s=1800.0)
_STOP_SECONDS = 60.0


class ContainerSandbox(sandbox.ForeignSandbox):
    """A sandbox that a command-line client starts, enters and removes.

    ``options["binary"]`` names the client.
    """

    kind: ClassVar[str]
    # how the client's last line starts if it did not run the command
    refusals: ClassVar[tuple[str, ...]]
    # what the client puts before the names of variables that it passes on
    env_prefix: ClassVar[str] = ""

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        if spec.image is None:
            raise SandboxError(f"a sandbox of kind {self.kind} needs an image")
        binary = spec.options.get("binary", self.kind)
        found = shutil.which(binary)
        if found is None:
            raise SandboxError(f"{binary} is not installed (not found on PATH)")
        self._binary = found
        self._image = spec.image
        self._processes = Processes()
        self._started = False

    def start(self) -> None:
        """Create the container, replacing one that a killed run left."""
        self._remove(self._processes)
        self._started = True
        done = self._client(*self._start_arguments())
        if done.code != 0:
            raise SandboxError(f"{self._image}: cannot be started: {done.summary}")
        self._shell("mkdir -p /home /tmp /work", cwd="/")

    def _enter(self, command: Command) -> CommandResult:
        done = self._client(
            *self._exec_arguments(command),
            *command.arguments,
            command=command,
            # the client reads the values from its environment: no process list shows them
            env={self.env_prefix + name: value for name, value in command.env.items()},
        )
        if done.code and done.last_line.startswith(self.refusals):
            raise SandboxError(f"{self.spec.name}: {done.last_line}")
        return done

    def stop(self) -> None:
        """Remove the container."""
        self._processes.end()
        if self._started:
            self._started = False
            self._remove(Processes())

    @abstractmethod
    def _start_arguments(self) -> list[str]: ...

    @abstractmethod
    def _exec_arguments(self, command: Command) -> list[str]:
        """The client's arguments before those of a command."""

    @abstractmethod
    def _remove_arguments(self) -> list[str]: ...

    def _remove(self, processes: Processes) -> None:
        arguments = (self._binary, *self._remove_arguments())
        processes.run(Command(arguments=arguments, timeout_s=_STOP_SECONDS), os.environ)

    def _limit_options(self, unit: str) -> list[str]:
        limits = self.spec.limits
        options = {
            "--memory": limits.memory_mb and f"{limits.memory_mb}{unit}",
            "--cpus": limits.cpus and f"{limits.cpus:g}",
            "--pids-limit": limits.processes and str(limits.processes),
        }
        given = ((name, value) for name, value in options.items() if value)
        return [part for pair in given for part in pair]

    def _client(
        self,
        *arguments: str,
        command: Command = _START,
        env: Mapping[str, str] = _START.env,
    ) -> CommandResult:
        """Run the client, with the timeout and the streams of ``command``."""
        command = replace(command, arguments=(self._binary, *arguments))
        return self._processes.run(command, {**os.environ, **env})
