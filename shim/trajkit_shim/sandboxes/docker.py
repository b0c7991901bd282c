"""A sandbox in a container of Docker, or of what takes its commands."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from trajkit_shim.processes import Processes
from trajkit_shim.sandbox import MARK, Done, Sandbox, SandboxError, SandboxKind, Spec

# an image may have to be fetched
_START_SECONDS = 900.0
_STOP_SECONDS = 60.0
# How the client begins when there is no container to run a command in.
_REFUSALS = ("Error response from daemon", "Error: No such", "Cannot connect to")
# What a container calls the machine that it runs on, where its network is not that
# machine's own.
_HOST = "host.docker.internal"


class DockerSandbox(Sandbox):
    """See the module.

    ``options["binary"]`` is the program (``docker``, or ``podman``), and
    ``options["network"]`` the container's network: ``host``, the default, where the
    gateway's loopback address is the container's too, or another one, from which the
    gateway must be listening on an address that the container reaches
    (``host.docker.internal``).
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.image is None:
            raise SandboxError("a docker sandbox needs an image, and has none")
        binary = spec.options.get("binary", "docker")
        found = shutil.which(binary)
        if found is None:
            raise SandboxError(f"{binary} is not installed (not found on PATH)")
        self._binary = found
        self._image = spec.image
        self._network = spec.options.get("network", "host")
        self._processes = Processes()
        self._started = False

    def start(self) -> None:
        """Create the container; one of the same name that a killed run left goes."""
        limits = self.spec.limits
        options = ["--name", self.spec.name, "--network", self._network]
        if self._network != "host":
            options += ["--add-host", f"{_HOST}:host-gateway"]
        if limits.memory_mb is not None:
            options += ["--memory", f"{limits.memory_mb}m"]
        if limits.cpus is not None:
            options += ["--cpus", f"{limits.cpus:g}"]
        if limits.processes is not None:
            options += ["--pids-limit", str(limits.processes)]
        if limits.file_mb is not None:
            options += ["--ulimit", f"fsize={limits.file_mb << 20}"]
        options += ["--env", f"{MARK}={self.spec.name}", "--init"]
        self._client("rm", "--force", self.spec.name)
        self._started = True
        done = self._client(
            *("run", "--detach", *options, "--entrypoint", "sleep"),
            *(self._image, "infinity"),
        )
        if done.code != 0:
            raise SandboxError(f"{self._image}: no container: {done.how}")
        self._copy("mkdir -p /home /tmp /work", cwd="/")

    def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        log: Path | None = None,
    ) -> Done:
        """Run one command in the container; see `Sandbox.exec`."""
        # the client reads these values, so that no process list shows them
        named = [part for name in env or {} for part in ("--env", name)]
        done = self._client(
            *("exec", "--interactive", "--env", "HOME=/home", "--env", "TMPDIR=/tmp"),
            *(*named, "--workdir", cwd or "/work", self.spec.name),
            *self._on_path(command),
            timeout_s=timeout_s,
            env=env,
            stdin=stdin,
            log=log,
        )
        if done.code is None:
            # The client is dead, its command is not. In the container's own process
            # namespace -1 is all but the first process and the one that asks.
            self._client("exec", self.spec.name, "sh", "-c", "kill -9 -1")
        if done.code and done.last_words.startswith(_REFUSALS):
            raise SandboxError(f"{self.spec.name}: {done.last_words}")
        return done

    def stop(self) -> None:
        """Remove the container."""
        self._processes.end()
        if self._started:
            Processes().run(
                [self._binary, "rm", "--force", "--volumes", self.spec.name],
                timeout_s=_STOP_SECONDS,
                env=os.environ,
            )
            self._started = False

    def place(self, path: str) -> str:
        """The path itself."""
        return path

    def reach(self, url: str) -> str:
        """The same on the host's network, else by the name of the host."""
        if self.spec.gateway is not None or self._network == "host":
            return super().reach(url)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{_HOST}:{rest.rpartition(':')[2]}"

    def _on_path(self, command: Sequence[str]) -> list[str]:
        """The command, with the spec's directories first in the image's own PATH."""
        if not self.spec.path:
            return list(command)
        first = ":".join(self.spec.path)
        script = 'PATH="$1:$PATH"; export PATH; shift; exec "$@"'
        return ["sh", "-c", script, "sh", first, *command]

    def _client(
        self,
        *arguments: str,
        timeout_s: float = _START_SECONDS,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        log: Path | None = None,
    ) -> Done:
        return self._processes.run(
            [self._binary, *arguments],
            timeout_s=timeout_s,
            env={**os.environ, **(env or {})},
            stdin=stdin,
            log=log,
        )


SANDBOX = SandboxKind(DockerSandbox, frozenset({"binary", "network"}))
