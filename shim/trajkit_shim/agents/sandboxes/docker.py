"""A sandbox in a container of Docker, or of a client with the same commands."""

from trajkit_shim.agents.container import ContainerSandbox
from trajkit_shim.agents.sandbox import MARK, Command, CommandResult, SandboxKind, Spec

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
        self._network = spec.options.get("network", "host")

    def run(self, command: Command) -> CommandResult:
        """Run one command in the container; see `Sandbox.exec`."""
        # the client reads the values from its environment: no process list shows them
        named = [part for name in command.env for part in ("--env", name)]
        done = self._client(
            *("exec", "--interactive", "--env", "HOME=/home", "--env", "TMPDIR=/tmp"),
            *(*named, "--workdir", command.cwd or "/work", self.spec.name),
            *self._with_path(command.arguments),
            command=command,
            env=command.env,
        )
        if done.code is None:
            # Killing the client did not kill the command. In the container's process
            # namespace, -1 is every process but the first and the caller.
            self._client("exec", self.spec.name, "sh", "-c", "kill -9 -1")
        return self._checked(done)

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

    def _remove_arguments(self) -> list[str]:
        return ["rm", "--force", "--volumes", self.spec.name]

    def _with_path(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """The command, with the spec's directories first on the image's own PATH."""
        if not self.spec.path:
            return arguments
        script = 'PATH="$1:$PATH"; export PATH; shift; exec "$@"'
        return ("sh", "-c", script, "sh", ":".join(self.spec.path), *arguments)


SANDBOX = SandboxKind(DockerSandbox, frozenset({"binary", "network"}))
