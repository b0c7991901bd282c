"""The directory that an agent works in: made, compared with its beginning, made again.

What the agent changed is found by a git repository beside the workspace, which the
agent's own commits and branches do not touch: committed, uncommitted, untracked and
binary changes are one patch. Files that the workspace's own ``.gitignore`` names, and
Python's compiled files, are not in it.
"""

from trajkit_shim.rollout.tasks import Task
from trajkit_shim.sandbox import Done, Sandbox, pack

_GIT_SECONDS = 300.0
_EXCLUDED = b"__pycache__/\n*.py[cod]\n"
# a file is its bytes, whatever the workspace's attributes would have git make of them
_ATTRIBUTES = b"* -text -ident -filter -working-tree-encoding\n"
# What is below another repository git takes for that one's business. So a nested
# repository's .git is put aside for a moment; that of the workspace itself is no file of
# it.
_ASIDE = ".git~trajkit"
_ADD = f"""
find . -path ./.git -prune -o -name .git -prune -exec sh -c \\
  'for each; do mv "$each" "${{each%.git}}{_ASIDE}"; done' sh {{}} +
"$@"
code=$?
find . -name '{_ASIDE}' -prune -exec sh -c \\
  'for each; do mv "$each" "${{each%{_ASIDE}}}.git"; done' sh {{}} +
exit $code
"""

_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "agent"),
        ("EMAIL", "agent@localhost"),
    )
}
"""Whose commits those of an agent are."""

# the first commit has the same hash in every rollout
_FIRST = {f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
# nobody's settings, and files may belong to another user
_SETTINGS = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}

AGENT_ENV = {**_IDENTITY, "GIT_CONFIG_NOSYSTEM": "1"}
"""What every process of an agent gets."""


class StageError(Exception):
    """A step of a rollout failed: the step, and why.

    Parameters
    ----------
    stage : str
        sandbox, setup, harness, diff or grade.
    reason : str
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage = stage
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


class Workspace:
    """The workspace of a task in a sandbox that runs.

    Parameters
    ----------
    task : Task
    sandbox : Sandbox
    """

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self.task = task
        self.sandbox = sandbox
        self.path = sandbox.place(task.workdir)
        self._base = sandbox.place("/base.git")
        self._start = ""

    def prepare(self) -> None:
        """Put the task's files there, set it up, and remember what it is like.

        Raises
        ------
        StageError
            The task's setup failed, or there is no git.
        SandboxError
        """
        files = self.task.workspace
        # an empty archive makes the directory
        self.sandbox.put(pack({}) if files is None else files.archive(), self.path)
        if self.task.setup:
            done = self.sandbox.exec(
                ["sh", "-c", self.task.setup],
                timeout_s=self.task.setup_timeout_s,
                cwd=self.path,
            )
            if done.code != 0:
                raise StageError("setup", done.how)
        # agents expect a repository
        script = "test -e .git || { git init -qb main && git add -A"
        script += " && git commit -qm Start --allow-empty; }"
        self._must("setup", ["sh", "-c", script], {**_IDENTITY, **_FIRST})
        self._must("setup", ["git", "init", "-q", "--bare", self._base])
        excluded = _EXCLUDED + f"{_ASIDE}\n".encode()
        files_of_info = {"exclude": excluded, "attributes": _ATTRIBUTES}
        self.sandbox.put(pack(files_of_info), f"{self._base}/info")
        self._start = self._snapshot("setup")

    def diff(self) -> bytes:
        """What was changed since `prepare`, as a patch; empty: nothing was.

        Raises
        ------
        StageError
            git failed, as where the agent removed what the comparison is made with.
        SandboxError
        """
        now = self._snapshot("diff")
        options = ("--binary", "--full-index", "--no-renames", "--no-ext-diff")
        done = self._git("diff", "diff", "--no-color", *options, self._start, now)
        return done.stdout

    def apply(self, patch: bytes) -> None:
        """Make the changes of a patch.

        Raises
        ------
        StageError
            It does not apply.
        SandboxError
        """
        if patch:
            self._git("grade", "apply", "--whitespace=nowarn", stdin=patch)

    def add_tests(self) -> None:
        """Put the task's tests over what is there.

        Raises
        ------
        SandboxError
        """
        if self.task.tests is not None:
            self.sandbox.put(self.task.tests.archive(), self.path)

    def _snapshot(self, stage: str) -> str:
        """The tree of all files, as git names it."""
        add = ["git", *self._where(), "add", "--all", "."]
        self._must(stage, ["sh", "-c", _ADD, "sh", *add])
        return self._git(stage, "write-tree").stdout.decode().strip()

    def _git(self, stage: str, *arguments: str, stdin: bytes = b"") -> Done:
        return self._must(stage, ["git", *self._where(), *arguments], stdin=stdin)

    def _where(self) -> tuple[str, str]:
        return f"--git-dir={self._base}", f"--work-tree={self.path}"

    def _must(
        self,
        stage: str,
        command: list[str],
        env: dict[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Done:
        done = self.sandbox.exec(
            command,
            timeout_s=_GIT_SECONDS,
            cwd=self.path,
            env={**_SETTINGS, **(env or {})},
            stdin=stdin,
        )
        if done.code != 0:
            raise StageError(stage, f"{command[0]}: {done.how}")
        return done
