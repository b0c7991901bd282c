"""The agent's working directory: created, compared with its start, created again.

A git repository outside the workspace finds what the agent changed, unaffected by the
agent's own commits and branches. Committed, uncommitted, untracked and binary changes
form one patch, but for files in the workspace's own ``.gitignore``. Only in the copy that
is graded, where no agent was, is it decided what of the patch counts (`changes`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from trajkit_rollout.agents.sandbox import Sandbox, pack
from trajkit_rollout.changes import LINK, Change, Choice, choose
from trajkit_rollout.tasks import Task

_GIT_SECONDS = 300.0
# Lists the modules that each Python here can import, without importing any. Without
# Python there is none.
_LIST = """
for each in python python3; do
  if command -v $each > /dev/null; then $each -I -c "$0" || exit; fi
done
"""
_LIST_MODULES = """
import os, sys
names = {*sys.builtin_module_names, *getattr(sys, "stdlib_module_names", ())}
for path in sys.path:
    if os.path.isdir(path):
        names.update(name.partition(".")[0] for name in os.listdir(path))
print(*names, sep=chr(10))
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
_EXCLUDED = f"{_ASIDE}\n".encode()
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

AGENT_ENV = {
    **_IDENTITY,
    "GIT_CONFIG_NOSYSTEM": "1",
    # a compiled module would be a change
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment of every agent."""


class StageError(Exception):
    """A stage of a rollout (sandbox, setup, harness, diff or grade) failed."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class AgentError(StageError):
    """A stage failed, and only what the agent did can be the reason."""


@contextmanager
def _by_agent() -> Iterator[None]:
    """Whatever fails in this block is due to what the agent left."""
    try:
        yield
    except StageError as error:
        raise AgentError(*error.args) from error


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
        """Return the changes since `prepare`, as a patch; empty if there is none.

        Raises `AgentError`: git cannot make one of the files that the agent left.
        """
        with _by_agent():
            return self._patch("diff", self._snapshot("diff"))

    def apply(self, patch: bytes) -> Choice:
        """Apply those changes of a patch that are graded, and return which they are.

        The patch is not trusted: what it changes is found out here. Raises `AgentError`:
        it cannot be applied.
        """
        if not patch:
            return Choice(graded=(), refused=(), risky=())
        with _by_agent():
            # In a patch, one change may have two names. In the tree that it makes, each
            # changed file has one.
            self._git("grade", *_APPLY, "--cached", stdin=patch)
            facts = self._facts(self._tree("grade"))
            changes = self._changes(facts)
        before = self._names("ls-tree", "-r", "--name-only", self._start)
        editable = self.task.editable
        choice = choose(changes, before, self._modules(), editable)
        if choice.graded:
            with _by_agent():
                self._take({name: facts[name] for name in choice.graded})
        return choice

    def _take(self, facts: Mapping[str, tuple[str, str]]) -> None:
        """Make changed files those of the workspace, from their modes and hashes."""
        self._git("grade", "read-tree", "--reset", self._start)
        # what is removed first: a folder may become a file, and a file a folder
        lines = [
            b"%s %s\t%s\0" % (mode.encode(), hash_.encode(), os.fsencode(name))
            for name, (mode, hash_) in sorted(
                facts.items(), key=lambda item: int(item[1][0], 8) != 0
            )
        ]
        index = ("update-index", "-z", "--index-info")
        self._git("grade", *index, stdin=b"".join(lines))
        tree = self._tree("grade")
        self._git("grade", "read-tree", "--reset", self._start)
        self._git("grade", "read-tree", "--reset", "-u", tree)

    def _facts(self, tree: str) -> dict[str, tuple[str, str]]:
        """The new mode and hash of each file that differs between the start and a tree."""
        fields = self._names(*_DIFF, "--raw", self._start, tree)
        # before each name: old mode, new mode, old hash, new hash, letter
        facts = [text.split() for text in fields[::2]]
        return {
            name: (fact[1], fact[3])
            for name, fact in zip(fields[1::2], facts, strict=True)
        }

    def _changes(self, facts: Mapping[str, tuple[str, str]]) -> list[Change]:
        """The changes, with the targets of links."""
        links = [(name, hash_) for name, (mode, hash_) in facts.items() if mode == LINK]
        targets = self._contents(links)
        return [
            Change(name, mode, targets.get(name)) for name, (mode, _) in facts.items()
        ]

    def _contents(self, files: Sequence[tuple[str, str]]) -> dict[str, str]:
        """The texts of files by name, from pairs of a name and a hash."""
        if not files:
            return {}
        hashes = "".join(f"{hash_}\n" for _, hash_ in files).encode()
        printed, texts = self._git("grade", "cat-file", "--batch", stdin=hashes), {}
        for name, _ in files:
            # hash, type and size; content
            head, _, printed = printed.partition(b"\n")
            size = int(head.split()[2])
            texts[name] = os.fsdecode(printed[:size])
            printed = printed[size + 1 :]
        return texts

    def _patch(self, stage: str, tree: str) -> bytes:
        """The changes from the start to a tree, as a patch."""
        ends = ("--patch", "--binary", self._start, tree)
        return self._git(stage, *_DIFF, *ends)

    def _names(self, command: str, *arguments: str) -> list[str]:
        """The texts that a git command prints, each with a null character at its end."""
        printed = self._git("grade", command, "-z", *arguments)
        return printed.decode(errors="surrogateescape").split("\0")[:-1]

    def _modules(self) -> list[str]:
        """The names that Python can import in the sandbox."""
        done = self.sandbox.exec(
            ["sh", "-c", _LIST, _LIST_MODULES],
            timeout_s=_GIT_SECONDS,
            cwd=self.sandbox.map_path("/tmp"),
        )
        if done.code != 0:
            message = f"Python's modules cannot be listed: {done.summary}"
            raise StageError("grade", message)
        return done.stdout.decode(errors="replace").split()

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
