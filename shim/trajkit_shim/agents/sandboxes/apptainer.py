"""A sandbox in an instance of Apptainer, which clusters have instead of Docker."""

import secrets
import shutil

from trajkit_shim.agents import sandbox
from trajkit_shim.agents.container import ContainerSandbox
from trajkit_shim.agents.processes import Processes


class ApptainerSandbox(ContainerSandbox):
    """An Apptainer instance on this machine's network.

    The image is a file or a URI. Written files go to an overlay below the scratch
    directory. ``options["binary"]`` is ``apptainer`` or ``singularity``.
    """

    kind = "apptainer"
    refusals = ("FATAL:",)

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        spec.limits.reject("apptainer", "file_mb")
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"

    def run(self, command: sandbox.Command) -> sandbox.CommandResult:
        """Run one command in the instance; see `Sandbox.exec`."""
        token = secrets.token_hex(8)
        env = {**command.env, sandbox.MARK: self.spec.name, sandbox.COMMAND_MARK: token}
        # Apptainer sets HOME itself and does not accept another one from outside
        script = 'PATH="$1$PATH" HOME=/home TMPDIR=/tmp; export PATH HOME TMPDIR; '
        script += 'shift; exec "$@"'
        first = "".join(f"{folder}:" for folder in self.spec.path)
        done = self._client(
            *("exec", "--cleanenv", "--pwd", command.cwd or "/work"),
            *(f"instance://{self.spec.name}", "sh", "-c", script, "sh", first),
            *command.arguments,
            command=command,
            env={f"APPTAINERENV_{name}": value for name, value in env.items()},
        )
        if done.code is None:
            # killing the client did not kill the command
            kill = sandbox.kill_script(sandbox.COMMAND_MARK, token)
            self._client("exec", f"instance://{self.spec.name}", "sh", "-c", kill)
        return self._checked(done)

    def _start_arguments(self) -> list[str]:
        self._overlay.mkdir(parents=True)
        options = ["--containall", "--cleanenv", "--overlay", str(self._overlay)]
        options += self._limit_options("M")
        return ["instance", "start", *options, self._image, self.spec.name]

    def _remove_arguments(self) -> list[str]:
        return ["instance", "stop", "--force", self.spec.name]

    def _remove(self, processes: Processes) -> None:
        super()._remove(processes)
        shutil.rmtree(self._overlay, ignore_errors=True)


SANDBOX = sandbox.SandboxKind(ApptainerSandbox, frozenset({"binary"}))
