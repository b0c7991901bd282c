"""A sandbox of E2B, in the cloud or on a cluster of one's own, by its Python package.

The gateway must be reachable from there, so its URL is needed. Output travels through
files, since the package reads the streams of a command as text.
"""

import importlib
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trajkit_shim.sandbox import (
    COMMAND_MARK,
    MARK,
    TAIL_BYTES,
    Done,
    Sandbox,
    SandboxError,
    SandboxKind,
    Spec,
    sweep_script,
)

# seconds that a sandbox lives if nobody stops it
_LIFETIME = 7200
_SHORT_SECONDS = 60.0


class E2BSandbox(Sandbox):
    """See the module.

    The image is an E2B template; None: their base. ``options["lifetime"]`` is after how
    many seconds E2B ends a sandbox that nobody stopped (7200). Their key is read by
    their package, from ``E2B_API_KEY``.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        spec.limits.refuse("E2B", "memory_mb", "cpus", "processes", "file_mb")
        if spec.gateway is None:
            raise SandboxError(
                "an E2B sandbox does not reach this machine: say under which URL it "
                "reaches the gateway"
            )
        if find_spec("e2b") is None:
            raise SandboxError("e2b is not installed: pip install e2b")
        lifetime = spec.options.get("lifetime", str(_LIFETIME))
        if not lifetime.isdecimal() or int(lifetime) < 1:
            raise SandboxError(f"lifetime = {lifetime!r} is no number of seconds")
        self._lifetime = int(lifetime)
        # it is no dependency, and brings types that are not here to be checked
        self._e2b: Any = importlib.import_module("e2b")
        self._box: Any = None

    def start(self) -> None:
        """Ask for it."""
        try:
            self._box = self._e2b.Sandbox.create(
                template=self.spec.image,
                timeout=self._lifetime,
                metadata={MARK: self.spec.name},
                envs={MARK: self.spec.name, "HOME": "/home", "TMPDIR": "/tmp"},
            )
            self._bash("mkdir -p /home /tmp /work", _SHORT_SECONDS)
        except self._e2b.SandboxException as error:
            raise SandboxError(f"e2b: {error}") from error

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
        """Run one command in the sandbox; see `Sandbox.exec`."""
        box = self._box
        if box is None:
            raise SandboxError("the sandbox was stopped")
        own = secrets.token_hex(8)
        given, out, err = (f"/tmp/.{own}.{name}" for name in ("in", "out", "err"))
        first = "".join(f"{folder}:" for folder in self.spec.path)
        script = (
            f"PATH={shlex.quote(first)}$PATH; cd {shlex.quote(cwd or '/work')} && "
            f"exec {shlex.join(command)} < {given} > {out} "
            + ("2>&1" if log is not None else f"2> {err}")
        )
        try:
            box.files.write(given, stdin, user="root")
            code = self._bash(script, timeout_s, {**(env or {}), COMMAND_MARK: own})
            if code is None:
                self._bash(sweep_script(COMMAND_MARK, own), _SHORT_SECONDS)
            said = bytes(box.files.read(out, format="bytes", user="root"))
            if log is None:
                complaint = bytes(box.files.read(err, format="bytes", user="root"))
                return Done(code, said, complaint)
        except self._e2b.SandboxException as error:
            raise SandboxError(f"e2b: {error}") from error
        finally:
            if self._box is not None:
                self._bash(f"rm -f {given} {out} {err}", _SHORT_SECONDS)
        log.write_bytes(said)
        return Done(code, said[-TAIL_BYTES:])

    def stop(self) -> None:
        """Give it back."""
        box, self._box = self._box, None
        if box is not None:
            try:
                box.kill()
            except self._e2b.NotFoundException:
                # its lifetime was over
                return

    def place(self, path: str) -> str:
        """The path itself."""
        return path

    def _bash(
        self, script: str, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> int | None:
        """Run a script: its exit code, None where its time was up."""
        try:
            done = self._box.commands.run(
                script, envs=dict(env or {}), user="root", timeout=math.ceil(timeout_s)
            )
        except self._e2b.TimeoutException:
            return None
        except self._e2b.CommandExitException as error:
            done = error
        code: int = done.exit_code
        return code


SANDBOX = SandboxKind(E2BSandbox, frozenset({"lifetime"}))
