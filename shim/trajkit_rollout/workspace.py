"""The agent's working directory: created, compared with its start, created again.

A git repository outside the workspace finds what the agent changed, unaffected by the
agent's own commits and branches. Committed, uncommitted, untracked and binary changes
form one patch, but for files in the workspace's own ``.gitignore``. Only in the copy that
is graded, where no agent was, is it decided what of the patch counts (`choose`;
docs/sandboxes.md has the rules).
"""

import os
import posixpath
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from trajkit_rollout.sandbox import Sandbox, pack
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
# files are compared as bytes, whatever the workspace's attributes say
_ATTRIBUTES = b"* -text -ident -filter -working-tree-encoding\n"
# agents expect a repository; the other one finds their changes
_INIT = """
base=$GIT_DIR && unset GIT_DIR GIT_WORK_TREE && test -e .git || {
  git init -qb main && git add -A && git commit -qm Start --allow-empty
} && git init -q --bare "$base"
"""
# git ignores files below another repository. So the .git of a nested repository is
# renamed for a moment; that of the workspace itself is not one of its files.
_ASIDE = ".git~trajkit"
_ADD = f"""
find . -path ./.git -prune -o -name .git -prune -exec sh -c \\
  'for each; do mv "$each" "${{each%.git}}{_ASIDE}"; done' sh {{}} +
git add --all .
code=$?
find . -name '{_ASIDE}' -prune -exec sh -c \\
  'for each; do mv "$each" "${{each%{_ASIDE}}}.git"; done' sh {{}} +
test $code = 0 || exit $code
"""
_TREE = f"{_ADD}git write-tree"
# Unlike diff, diff-tree ignores settings that change a patch's paths: an agent can write
# to the repository's configuration.
_DIFF = 'git diff-tree -r --no-renames --full-index {} "$0" $(git write-tree)'
_PATCH = _ADD + _DIFF.format("--patch --binary")
# In a patch, one change may have two names. In the tree that it makes, each changed file
# has one.
_APPLY = f"git apply --whitespace=nowarn --cached && {_DIFF.format('--raw -z')}"
_TAKE = """
git read-tree --reset "$0" && git update-index -z --index-info &&
tree=$(git write-tree) && git read-tree --reset "$0" && git read-tree --reset -u $tree
"""

_WHO = [f"GIT_{who}" for who in ("AUTHOR", "COMMITTER")]
_IDENTITY = {f"{who}_NAME": "agent" for who in _WHO}
_IDENTITY |= {f"{who}_EMAIL": "agent@localhost" for who in _WHO}
_SETTINGS = {
    # gives the first commit the same hash in every rollout
    **_IDENTITY,
    **{f"{who}_DATE": "2000-01-01T00:00:00Z" for who in _WHO},
    # ignore the user's configuration; files may belong to another user
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

LINK = "120000"
"""Git's mode of a symbolic link."""
_REPOSITORY = "160000"
_REMOVED = "000000"

# names of files, whichever folder they are in
_FILES = (
    # Python: test runners, start of the interpreter, packaging, compiled files
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-link"),
    *("pytest.ini", "pytest.toml", "tox.ini", "tox.toml", "noxfile.py", "setup.py"),
    *("setup.cfg", "pyproject.toml", "pyvenv.cfg", "uv.toml", "uv.lock", "*.py[cod]"),
    *("requirements*.txt", "constraints*.txt", "entry_points.txt", "manage.py"),
    # other languages and build tools
    *("makefile", "gnumakefile", "*.mk", "cmakelists.txt", "ctest*", "justfile"),
    *("package.json", "package-lock.json", "*.config.js", "*.config.[cm]js"),
    *("*.config.ts", "tsconfig*.json", "cargo.toml", "cargo.lock", "build.rs"),
    *("go.mod", "go.sum", "gemfile*", "rakefile", "pom.xml", "build.gradle*"),
    *("dockerfile*", "run_tests*", "runtests*"),
    # tests
    *("test_*.py", "*_test.py", "test.py", "tests.py", "*_test.go", "*_spec.rb"),
    *("*.test.[jt]s*", "*.spec.[jt]s*", "*.test.[cm][jt]s", "*.spec.[cm][jt]s"),
)
# names of folders; hidden ones are risky too
_FOLDERS = ("tests", "__tests__", "__pycache__", "*.dist-info", "*.egg-info", "*.egg")
_ROOT_FOLDERS = ("test", "spec", "specs", "testing")
_WILDCARDS = {"*": "[^/]*", "?": "[^/]"}
# what Python can import
_MODULES = (".py", ".pyc", ".so", ".pyd", ".pth", ".zip")


class StageError(Exception):
    """A stage of a rollout (sandbox, setup, harness, diff or grade) failed."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class AgentError(StageError):
    """A stage failed, and only what the agent did can be the reason."""


class Workspace:
    """The workspace of a task in a running sandbox.

    All methods may raise `SandboxError`, and `StageError` if the task or git fails.
    """

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self.task = task
        self.sandbox = sandbox
        self.path = sandbox.map_path(task.workdir)
        self._base = sandbox.map_path("/base.git")
        self._start = ""

    def prepare(self) -> None:
        """Put the task's files there, run its setup, and record the initial state."""
        files, setup = self.task.workspace, self.task.setup
        # an empty archive creates the directory
        self.sandbox.put(pack({}) if files is None else files.archive(), self.path)
        if setup.command:
            command = ["sh", "-c", setup.command]
            done = self.sandbox.exec(command, timeout_s=setup.timeout_s, cwd=self.path)
            if done.code != 0:
                raise StageError("setup", done.summary)
        self._git("setup", _INIT)
        info = {"exclude": f"{_ASIDE}\n".encode(), "attributes": _ATTRIBUTES}
        self.sandbox.put(pack(info), f"{self._base}/info")
        self._start = self._git("setup", _TREE).decode().strip()

    def diff(self) -> bytes:
        """Return the changes since `prepare`, as a patch; empty if there is none.

        Raises `AgentError`: git cannot make one of the files that the agent left.
        """
        return self._git("diff", _PATCH, error=AgentError)

    def apply(self, patch: bytes) -> dict[str, str]:
        """Apply those changes of a patch that are graded, and return `choose`'s answer.

        The patch is not trusted: what it changes is found out here. Raises `AgentError`:
        it cannot be applied.
        """
        if not patch:
            return {}
        # old mode, new mode, old hash, new hash, letter; name
        raw = self._git("grade", _APPLY, patch, AgentError)
        fields = raw.decode(errors="surrogateescape").split("\0")
        facts = [text.split() for text in fields[:-1:2]]
        after = dict(zip(fields[1::2], [(f[1], f[3]) for f in facts], strict=True))
        links = {name: hash_ for name, (mode, hash_) in after.items() if mode == LINK}
        targets = self._contents(links) if links else {}
        changes = {name: (mode, targets.get(name)) for name, (mode, _) in after.items()}
        listed = self._git("grade", 'git ls-tree -r --name-only -z "$0"')
        before = listed.decode(errors="surrogateescape").split("\0")[:-1]
        verdicts = choose(changes, before, self._modules(), self.task.editable)
        # what is removed first: a folder may become a file, and a file a folder
        graded = [name for name in after if verdicts[name] != "refused"]
        graded.sort(key=lambda name: after[name][0] != _REMOVED)
        lines = ("{} {}\t{}\0".format(*after[name], name) for name in graded)
        if graded:
            self._git("grade", _TAKE, os.fsencode("".join(lines)), AgentError)
        return verdicts

    def _contents(self, files: Mapping[str, str]) -> dict[str, str]:
        """The texts of files by name, from their hashes by name."""
        hashes = "".join(f"{hash_}\n" for hash_ in files.values()).encode()
        printed, texts = self._git("grade", "git cat-file --batch", hashes), {}
        for name in files:
            # hash, type and size; content
            head, _, printed = printed.partition(b"\n")
            size = int(head.split()[2])
            texts[name] = os.fsdecode(printed[:size])
            printed = printed[size + 1 :]
        return texts

    def _modules(self) -> list[str]:
        done = self.sandbox.exec(
            ["sh", "-c", _LIST, _LIST_MODULES],
            timeout_s=_GIT_SECONDS,
            cwd=self.sandbox.map_path("/tmp"),
        )
        if done.code != 0:
            message = f"Python's modules cannot be listed: {done.summary}"
            raise StageError("grade", message)
        return done.stdout.decode(errors="replace").split()

    def _git(
        self,
        stage: str,
        script: str,
        stdin: bytes = b"",
        error: type[StageError] = StageError,
    ) -> bytes:
        """The output of a script, whose git has the repository that finds the changes.

        ``$0`` is the tree of the start.
        """
        command = ["sh", "-c", script, self._start]
        env = {**_SETTINGS, "GIT_DIR": self._base, "GIT_WORK_TREE": self.path}
        done = self.sandbox.exec(
            command, timeout_s=_GIT_SECONDS, cwd=self.path, env=env, stdin=stdin
        )
        if done.code != 0:
            raise error(stage, f"git: {done.summary}")
        return done.stdout


def choose(
    changes: Mapping[str, tuple[str, str | None]],
    before: Collection[str],
    modules: Collection[str],
    editable: Sequence[str] | None,
) -> dict[str, str]:
    """Return for each change ``graded``, ``refused``, or ``risky``: graded due to ``**``.

    A change that can make tests run differently, and a new module outside of the
    packages, needs a pattern that names it without wildcards up to the folder or file
    that makes it so, or the pattern ``**``.

    Parameters
    ----------
    changes : mapping
        Git's mode of each changed file, ``000000`` if it was removed, and the target of a
        symbolic link.
    before, modules : collection of str
        The files that the workspace had, and the names that Python can import there.
    editable : sequence of str, optional
        Patterns, in which ``*`` is part of a name and ``**`` any number of folders.
        Default: files that the workspace had, and new ones inside its Python packages.
    """
    files, known = frozenset(before), {_plain(name) for name in modules}
    folders = {folder for file in files for folder in _folders(file)}
    packages = {folder for folder in folders if f"{folder}/__init__.py" in files}
    patterns = [(_compiled(text), text.split("/")) for text in editable or ()]
    everything = editable is not None and "**" in editable

    def covered(name: str) -> bool:
        return name in files or not packages.isdisjoint(_folders(name))

    def risk(name: str, mode: str, parts: list[str]) -> int:
        """The index of the last part of a path that makes it risky, or -1."""
        plain, last = [_plain(part) for part in parts], len(parts) - 1
        if mode == LINK or any(fnmatchcase(plain[-1], text) for text in _FILES):
            return last
        risk = -1
        for k, part in enumerate(plain):
            # not printable: also a byte that is not UTF-8
            odd = part.startswith(".") or not parts[k].isprintable()
            folder = k < last and any(fnmatchcase(part, text) for text in _FOLDERS)
            if odd or folder or (k == 0 < last and part in _ROOT_FOLDERS):
                risk = k
        if plain[-1].endswith(_MODULES) and name not in files:
            first = 0
            while "/".join(parts[: first + 1]) in folders:
                first += 1
            if not covered(name):
                risk = max(risk, first)
            for k in range(first, len(parts)):
                if plain[k].partition(".")[0] in known:
                    risk = k
        return risk

    verdicts = {}
    for name, (mode, target) in changes.items():
        parts = name.split("/")
        k = risk(name, mode, parts)
        if mode == _REPOSITORY or (mode == LINK and _leaves(name, target)):
            allowed = False
        elif editable is None:
            allowed = k < 0 and covered(name)
        else:
            allowed = everything or any(
                names[: k + 1] == parts[: k + 1] and pattern.fullmatch(name)
                for pattern, names in patterns
            )
        risky = "risky" if everything and k >= 0 else "graded"
        verdicts[name] = risky if allowed else "refused"
    return verdicts


def _folders(path: str) -> Iterator[str]:
    """The folders that a path is in, without the root."""
    while path := posixpath.dirname(path):
        yield path


def _plain(name: str) -> str:
    """A name as a careless file system or importer may read it."""
    text = unicodedata.normalize("NFKC", name)
    return "".join(c for c in text if unicodedata.category(c) != "Cf").casefold()


def _leaves(name: str, target: str | None) -> bool:
    """Whether a link leads out of the workspace, as far as its text says."""
    if target is None or target.startswith("/"):
        return True
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return path == ".." or path.startswith("../") or ".git" in path.split("/")


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of paths as a regular expression. Paths may have any number of parts."""
    *folders, name = (
        "**"
        if part == "**"
        else "".join(_WILDCARDS.get(c) or re.escape(c) for c in part)
        for part in pattern.split("/")
    )
    text = "".join("(?:.*/)?" if f == "**" else f"{f}/" for f in folders)
    return re.compile(text + (".*" if name == "**" else name), re.DOTALL)
