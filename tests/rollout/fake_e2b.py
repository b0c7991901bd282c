"""What the tests have in place of E2B's package: its names, over `fake_docker`."""

import subprocess
import uuid
from dataclasses import dataclass


class SandboxException(Exception):
    """Of the service."""


class NotFoundException(SandboxException):
    """No such file or sandbox."""


class TimeoutException(SandboxException):
    """The command's time was up."""


@dataclass
class CommandResult:
    stdout: str
    stderr: str
    exit_code: int


class CommandExitException(SandboxException, CommandResult):
    """The command's code is not 0."""

    def __init__(self, stdout, stderr, exit_code):
        SandboxException.__init__(self, f"exit code {exit_code}")
        CommandResult.__init__(self, stdout, stderr, exit_code)


def docker(*arguments, **options):
    return subprocess.run(
        ["docker", *arguments], capture_output=True, check=False, **options
    )


class Commands:
    def __init__(self, name):
        self._name = name

    def run(self, cmd, *, envs=None, user=None, cwd=None, timeout=60):
        given = [
            part for pair in (envs or {}).items() for part in ("--env", "=".join(pair))
        ]
        command = ["bash", "-l", "-c", cmd]
        assert user == "root"
        try:
            done = docker("exec", *given, self._name, *command, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutException("context deadline exceeded") from error
        if b"No such container" in done.stderr:
            raise NotFoundException("sandbox not found")
        # as the package does, which loses what is no text
        stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode()
        if done.returncode:
            raise CommandExitException(stdout, stderr, done.returncode)
        return CommandResult(stdout, stderr, 0)


class Files:
    def __init__(self, name):
        self._name = name

    def write(self, path, data, *, user=None):
        command = ["sh", "-c", f"cat > {path}"]
        done = docker("exec", "--interactive", self._name, *command, input=data)
        if done.returncode:
            raise NotFoundException(done.stderr.decode())

    def read(self, path, *, format="text", user=None):
        done = docker("exec", self._name, "cat", path)
        if done.returncode:
            raise NotFoundException(done.stderr.decode())
        return bytearray(done.stdout) if format == "bytes" else done.stdout.decode()


class Sandbox:
    def __init__(self, name):
        self._name = name
        self.commands, self.files = Commands(name), Files(name)

    @classmethod
    def create(cls, template=None, timeout=None, *, metadata=None):
        if template == "absent":
            raise SandboxException("404: template 'absent' not found")
        name = f"e2b-{uuid.uuid4().hex}"
        docker(
            *("run", "--detach", "--name", name),
            *("--entrypoint", "sleep", "any", "infinity"),
        )
        return cls(name)

    def kill(self):
        docker("rm", "--force", self._name)
        return True
