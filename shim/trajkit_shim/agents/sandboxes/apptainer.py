"""A sandbox in an instance of Apptainer, which clusters have instead of Docker."""

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
    env_prefix = "APPTAINERENV_"
    exposes = sandbox.SHARED_NETWORK

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        spec.limits.reject("apptainer", "file_mb", "disk_mb")
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"

    def _start_arguments(self) -> list[str]:
        self._overlay.mkdir(parents=True)
        options = ["--containall", "--cleanenv", "--overlay", str(self._overlay)]
        options += self._limit_options("M")
        return ["instance", "start", *options, self._image, self.spec.name]

    def _exec_arguments(self, command: sandbox.Command) -> list[str]:
        where = ["--pwd", str(command.cwd), f"instance://{self.spec.name}"]
        return ["exec", "--cleanenv", *where]

    def _remove_arguments(self) -> list[str]:
        return ["instance", "stop", "--force", self.spec.name]

    def _remove(self, processes: Processes) -> None:
        super()._remove(processes)
        shutil.rmtree(self._overlay, ignore_errors=True)


SANDBOX = sandbox.SandboxKind(ApptainerSandbox, frozenset({"binary"}))
