"""A sandbox in a container of Docker, or of a client with the same commands."""

from trajkit_shim.agents.container import ContainerSandbox
from trajkit_shim.agents.sandbox import MARK, SHARED_NETWORK, Command, SandboxKind, Spec

# name of the host machine inside a container that does not use the host's network
_HOST = "host.docker.internal"


class DockerSandbox(ContainerSandbox):
    """A container.

    ``options["binary"]`` is the client (``docker`` or ``podman``). ``options["network"]``
    is the container's network, by default ``host``, where the container shares the
    gateway's loopback address. With another one the gateway must listen on an address
    that the container can reach as ``host.docker.internal``.
    """

    kind = "docker"
    refusals = ("Error response from daemon", "Error: No such", "Cannot connect to")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        spec.limits.reject("docker", "disk_mb")
        self._network = spec.options.get("network", "host")

    @property
    def exposes(self) -> str | None:
        """The network, if it is this machine's."""
        return SHARED_NETWORK if self._network == "host" else None

    def map_url(self, url: str) -> str:
        """Return the URL with the name of the host, unless the network is the host's."""
        if self.spec.gateway is not None or self._network == "host":
            return super().map_url(url)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{_HOST}:{rest.rpartition(':')[2]}"

    def _start_arguments(self) -> list[str]:
        options = ["--name", self.spec.name, "--network", self._network]
        if self._network != "host":
            options += ["--add-host", f"{_HOST}:host-gateway"]
        options += self._limit_options("m")
        if self.spec.limits.file_mb is not None:
            options += ["--ulimit", f"fsize={self.spec.limits.file_mb << 20}"]
        options += ["--env", f"{MARK}={self.spec.name}", "--init"]
        options += ["--entrypoint", "sleep", self._image, "infinity"]
        return ["run", "--detach", *options]

    def _exec_arguments(self, command: Command) -> list[str]:
        named = [part for name in command.env for part in ("--env", name)]
        where = ["--workdir", str(command.cwd)]
        return ["exec", "--interactive", *named, *where, self.spec.name]

    def _remove_arguments(self) -> list[str]:
        return ["rm", "--force", "--volumes", self.spec.name]


SANDBOX = SandboxKind(DockerSandbox, frozenset({"binary", "network"}))
