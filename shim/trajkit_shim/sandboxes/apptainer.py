"""A sandbox in an instance of Apptainer: what clusters have in place of Docker."""

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from trajkit_shim.processes import Processes
from trajkit_shim.sandbox import (
    COMMAND_MARK,
    MARK,
    Done,
    Sandbox,
    SandboxError,
    SandboxKind,
    Spec,
    sweep_script,
)

# an image may have to be fetched and converted
_START_SECONDS = 1800.0
_STOP_SECONDS = 60.0
# how the client begins where it has not run the command
_REFUSAL = "FATAL:"


class ApptainerSandbox(Sandbox):
    """See the module.

    The image is a file or a URI. What is written goes to an overlay below the scratch
    directory. ``options["binary"]`` is the program (``apptainer``, or ``singularity``).
    The network is this machine's own.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.image is None:
            raise SandboxError("an apptainer sandbox needs an image, and has none")
        spec.limits.refuse("apptainer", "file_mb")
        binary = spec.options.get("binary", "apptainer")
        found = shutil.which(binary)
        if found is None:
            raise SandboxError(f"{binary} is not installed (not found on PATH)")
        self._binary = found
        self._image = spec.image
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"
        self._processes = Processes()
        self._started = False

    def start(self) -> None:
        """Start the instance; one of the same name that a killed run left goes."""
        limits = self.spec.limits
        options = ["--containall", "--cleanenv", "--overlay", str(self._overlay)]
        if limits.memory_mb is not None:
            options += ["--memory", f"{limits.memory_mb}M"]
        if limits.cpus is not None:
            options += ["--cpus", f"{limits.cpus:g}"]
        if limits.processes is not None:
            options += ["--pids-limit", str(limits.processes)]
        self._remove()
        self._overlay.mkdir(parents=True)
        self._started = True
        done = self._client("instance", "start", *options, self._image, self.spec.name)
        if done.code != 0:
            raise SandboxError(f"{self._image}: no instance: {done.how}")
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
        """Run one command in the instance; see `Sandbox.exec`."""
        own = secrets.token_hex(8)
        given = {**(env or {}), MARK: self.spec.name, COMMAND_MARK: own}
        # Apptainer sets the home directory itself, and takes no other from outside
        script = 'PATH="$1$PATH" HOME=/home TMPDIR=/tmp; export PATH HOME TMPDIR; '
        script += 'shift; exec "$@"'
        first = "".join(f"{folder}:" for folder in self.spec.path)
        done = self._client(
            *("exec", "--cleanenv", "--pwd", cwd or "/work"),
            *(f"instance://{self.spec.name}", "sh", "-c", script, "sh", first),
            *command,
            timeout_s=timeout_s,
            env={f"APPTAINERENV_{name}": value for name, value in given.items()},
            stdin=stdin,
            log=log,
        )
        if done.code is None:
            # the client is dead, its command is not
            sweep = sweep_script(COMMAND_MARK, own)
            self._client("exec", f"instance://{self.spec.name}", "sh", "-c", sweep)
        if done.code and done.last_words.startswith(_REFUSAL):
            raise SandboxError(f"{self.spec.name}: {done.last_words}")
        return done

    def stop(self) -> None:
        """Stop the instance and remove what it wrote."""
        self._processes.end()
        if self._started:
            self._started = False
            self._remove()

    def place(self, path: str) -> str:
        """The path itself."""
        return path

    def _remove(self) -> None:
        Processes().run(
            [self._binary, "instance", "stop", "--force", self.spec.name],
            timeout_s=_STOP_SECONDS,
            env=os.environ,
        )
        shutil.rmtree(self._overlay, ignore_errors=True)

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


SANDBOX = SandboxKind(ApptainerSandbox, frozenset({"binary"}))
