"""A sandbox of E2B, in its cloud or on a private cluster, by its Python package.

The gateway must be reachable from there, so its URL is required. Output is copied
through files, because the package decodes the streams of a command as text.
"""

import importlib
import math
import secrets
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, ClassVar

from trajkit_rollout.agents import sandbox
from trajkit_rollout.agents.sandbox import (
    TAIL_BYTES,
    Command,
    CommandResult,
    SandboxError,
)

_SHORT_SECONDS = 60.0


class E2BSandbox(sandbox.ForeignSandbox):
    """See the module.

    The image is an E2B template; None: E2B's base. ``options["lifetime"]`` is the number
    of seconds after which E2B ends a sandbox that was not stopped (7200). Their package
    reads its key from ``E2B_API_KEY``.
    """

    kind = "e2b"
    options: ClassVar = {"lifetime": "7200"}

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        if spec.gateway is None:
            raise SandboxError(
                "an E2B sandbox cannot reach this machine: give the URL by which it "
                "reaches the gateway"
            )
        if find_spec("e2b") is None:
            raise SandboxError("e2b is not installed: pip install e2b")
        lifetime = self.chosen["lifetime"]
        if not lifetime.isdecimal() or int(lifetime) < 1:
            raise SandboxError(f"lifetime = {lifetime!r} is not a number of seconds")
        self._lifetime = int(lifetime)
        # an optional package whose types are not available to type checkers
        self._e2b: Any = importlib.import_module("e2b")
        self._box: Any = None

    def start(self) -> None:
        with _failures():
            self._box = self._e2b.Sandbox.create(
                template=self.spec.image,
                timeout=self._lifetime,
                metadata={sandbox.MARK: self.spec.name},
            )
        self._make_directories()

    def _enter(self, command: Command) -> CommandResult:
        # `stop` may take it away at any time
        box = self._box
        if box is None:
            raise SandboxError("the sandbox was stopped")
        token = secrets.token_hex(8)
        given, out, err = (f"/tmp/.{token}.{name}" for name in ("in", "out", "err"))
        to = "&1" if command.log is not None else err
        script = f"exec {shlex.join(command.arguments)} < {given} > {out} 2>{to}"
        script = f"cd {shlex.quote(command.cwd)} && {script}"
        try:
            with _failures():
                box.files.write(given, command.stdin, user="root")
                code = self._bash(box, script, command.timeout_s, command.env)
                output = bytes(box.files.read(out, format="bytes", user="root"))
                if command.log is None:
                    errors = bytes(box.files.read(err, format="bytes", user="root"))
                    return CommandResult(code, output, errors)
        finally:
            with suppress(SandboxError), _failures():
                self._bash(box, f"rm -f {given} {out} {err}", _SHORT_SECONDS, {})
        command.log.write_bytes(output)
        return CommandResult(code, output[-TAIL_BYTES:])

    def _remove(self) -> None:
        # its lifetime may have ended
        with _failures(), suppress(self._e2b.NotFoundException):
            if self._box is not None:
                self._box.kill()
        self._box = None

    def _bash(
        self, box: Any, script: str, timeout_s: float, env: Mapping[str, str]
    ) -> int | None:
        """Run a script; return its exit code, or None if it timed out."""
        given = {"envs": dict(env), "timeout": math.ceil(timeout_s)}
        try:
            return int(box.commands.run(script, user="root", **given).exit_code)
        except self._e2b.TimeoutException:
            return None
        except self._e2b.CommandExitException as error:
            return int(error.exit_code)


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what the package raises, its own errors and those of HTTP, into ours."""
    try:
        yield
    except Exception as error:
        raise SandboxError(f"e2b: {error}") from error
