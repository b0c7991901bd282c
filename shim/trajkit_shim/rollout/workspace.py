"""The agent's working directory: created, compared with its start, created again.

A git repository outside the workspace finds what the agent changed, unaffected by the
agent's own commits and branches. Committed, uncommitted, untracked and binary changes
form one patch. Files in the workspace's own ``.gitignore`` and compiled Python files are
excluded.
"""

import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from trajkit_shim.agents.sandbox import Sandbox, pack
from trajkit_shim.rollout.tasks import Task

_GIT_SECONDS = 300.0
_RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging")
# without Python there is no module
_FIND = """
python=$(command -v python || command -v python3) || exit 0
exec "$python" -I -c "$0" "$@"
"""
_FIND_SPEC = """
import importlib.util, sys
for name in sys.argv[1:]:
    if name in sys.modules or importlib.util.find_spec(name):
        print(name)
"""
# Unlike diff, diff-tree ignores settings that change a patch's paths: an agent can write
# to the repository's configuration.
_DIFF = ("diff-tree", "-r", "--no-renames", "--full-index")
_APPLY = ("apply", "--whitespace=nowarn")
# files are compared as bytes, whatever the workspace's attributes say
_ATTRIBUTES = b"* -text -ident -filter -working-tree-encoding\n"
# git ignores files below another repository. So the .git of a nested repository is
# renamed for a moment; that of the workspace itself is not one of its files.
_ASIDE = ".git~trajkit"
_EXCLUDED = f"__pycache__/\n*.py[cod]\n{_ASIDE}\n".encode()
_ADD = f"""
find . -path ./.git -prune -o -name .git -prune -exec sh -c \\
  'for each; do mv "$each" "${{each%.git}}{_ASIDE}"; done' sh {{}} +
git add --all .
code=$?
find . -name '{_ASIDE}' -prune -exec sh -c \\
  'for each; do mv "$each" "${{each%{_ASIDE}}}.git"; done' sh {{}} +
exit $code
"""

# agents expect a repository; the other one finds their changes
_INIT = """
test -e .git || {
  git init -qb main && git add -A && git commit -qm Start --allow-empty
} && git init -q --bare "$0"
"""

_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "agent"), ("EMAIL", "agent@localhost"))
}
"""The author of an agent's commits."""

# gives the first commit the same hash in every rollout
_FIRST = {f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
# ignore the user's configuration; files may belong to another user
_SETTINGS = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}

AGENT_ENV = {**_IDENTITY, "GIT_CONFIG_NOSYSTEM": "1"}
"""Environment of every agent."""


class StageError(Exception):
    """A stage of a rollout (sandbox, setup, harness, diff or grade) failed."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class Workspace:
    """The workspace of a task in a running sandbox.

    All methods may raise `SandboxError`, and `StageError` if the task or git fails.
    """

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self.task = task
        self.sandbox = sandbox
        self.path = sandbox.map_path(task.workdir)
        self._base = sandbox.map_path("/base.git")
        # of git commands on the repository that finds the changes
        self._env = {"GIT_DIR": self._base, "GIT_WORK_TREE": self.path}
        self._start = ""

    def prepare(self) -> None:
        """Put the task's files there, run its setup, and record the initial state."""
        files = self.task.workspace
        # an empty archive creates the directory
        self.sandbox.put(pack({}) if files is None else files.archive(), self.path)
        setup = self.task.setup
        if setup.command:
            command = ["sh", "-c", setup.command]
            done = self.sandbox.exec(command, timeout_s=setup.timeout_s, cwd=self.path)
            if done.code != 0:
                raise StageError("setup", done.summary)
        self._must("setup", ["sh", "-c", _INIT, self._base], {**_IDENTITY, **_FIRST})
        info = {"exclude": _EXCLUDED, "attributes": _ATTRIBUTES}
        self.sandbox.put(pack(info), f"{self._base}/info")
        self._start = self._snapshot("setup")

    def diff(self) -> bytes:
        """Return the changes since `prepare`, as a patch; empty if there is none."""
        return self._patch("diff", self._snapshot("diff"))

    def apply(self, patch: bytes) -> list[str]:
        """Apply a patch but for changes that could change how tests run.

        Returns the names of their files. The patch is not trusted: what it changes is
        found out here.
        """
        if not patch:
            return []
        # In a patch, one change may have two names, and options of `git apply` see only
        # one. In the tree that it makes, each changed file has one.
        self._git("grade", *_APPLY, "--cached", stdin=patch)
        tree = self._tree("grade")
        names = (*_DIFF, "--name-only", self._start, tree)
        ignored = self._ignored(self._names(*names))
        excluded = (f":(exclude,literal){name}" for name in ignored)
        if graded := self._patch("grade", tree, *excluded):
            self._git("grade", *_APPLY, stdin=graded)
        return ignored

    def _patch(self, stage: str, tree: str, *paths: str) -> bytes:
        """The changes from the start to a tree, as a patch."""
        ends = ("--patch", "--binary", self._start, tree, "--", ".")
        return self._git(stage, *_DIFF, *ends, *paths)

    def _ignored(self, changed: list[str]) -> list[str]:
        """The names of changed files that are protected, or whose modules shadow others."""
        protect = self.task.grade.protect
        if not protect:
            return []
        before = {*self._names("ls-tree", "-r", "--name-only", self._start)}
        tops = {PurePosixPath(name).parts[0] for name in before}
        added = {n: PurePosixPath(n).parts[0] for n in changed if n not in before}
        shadows = {*_RUNNERS, *sys.stdlib_module_names}
        shadows |= self._importable({*added.values()} - tops)
        return [
            name
            for name in changed
            if added.get(name, "").partition(".")[0] in shadows
            or any(
                fnmatch(name if "/" in pattern else PurePosixPath(name).name, pattern)
                for pattern in protect
            )
        ]

    def _names(self, command: str, *arguments: str) -> list[str]:
        """The texts that a git command prints, each with a null character at its end."""
        printed = self._git("grade", command, "-z", *arguments)
        return printed.decode(errors="surrogateescape").split("\0")[:-1]

    def _importable(self, names: set[str]) -> set[str]:
        """The modules of these files and folders that Python has already."""
        modules = sorted({name.partition(".")[0] for name in names})
        done = self.sandbox.exec(
            ["sh", "-c", _FIND, _FIND_SPEC, *filter(str.isidentifier, modules)],
            timeout_s=_GIT_SECONDS,
            cwd=self.sandbox.map_path("/tmp"),
        )
        if done.code != 0:
            message = f"Python's modules cannot be listed: {done.summary}"
            raise StageError("grade", message)
        return {*done.stdout.decode(errors="replace").split()}

    def _snapshot(self, stage: str) -> str:
        """The git tree of all files."""
        self._must(stage, ["sh", "-c", _ADD], self._env)
        return self._tree(stage)

    def _tree(self, stage: str) -> str:
        """The git tree of all files in the index."""
        return self._git(stage, "write-tree").decode().strip()

    def _git(self, stage: str, *arguments: str, stdin: bytes = b"") -> bytes:
        return self._must(stage, ["git", *arguments], self._env, stdin)

    def _must(
        self, stage: str, command: list[str], env: Mapping[str, str], stdin: bytes = b""
    ) -> bytes:
        """The output of a command that has to succeed."""
        env = {**_SETTINGS, **env}
        done = self.sandbox.exec(
            command, timeout_s=_GIT_SECONDS, cwd=self.path, env=env, stdin=stdin
        )
        if done.code != 0:
            raise StageError(stage, f"{command[0]}: {done.summary}")
        return done.stdout
