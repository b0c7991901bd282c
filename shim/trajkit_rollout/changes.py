"""Which of an agent's changes are graded.

Without a task's ``editable``: changes of files that the workspace had, and new files
inside Python packages that it had. Not among them are *risky* changes, which can change
how tests run:

- tests, settings of test runners, packaging, hidden files, compiled Python files;
- new files or folders with the name of a module that Python has already;
- symbolic links and nested repositories.

``editable`` has patterns of paths, in which ``*`` is part of a name and ``**`` any number
of folders. What a pattern matches is graded. A risky change, and a new module outside the
packages, needs a pattern that names it without wildcards up to the folder or file that
makes it risky: ``src/**`` does not include ``src/conftest.py``, nor ``src/new/a.py`` if
the folder ``new`` did not exist, but ``src/new/**`` does. The pattern ``**`` includes
every change but links that leave the workspace; risky ones are then listed.
"""

import posixpath
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

LINK = "120000"
"""Git's mode of a symbolic link."""

_REPOSITORY = "160000"

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


@dataclass(frozen=True, slots=True)
class Change:
    """One changed file. ``mode``: git's, ``000000`` if it was removed."""

    name: str
    mode: str
    target: str | None = None  # of a symbolic link


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The names of changes, by whether they are graded."""

    graded: Sequence[str]
    refused: Sequence[str]
    risky: Sequence[str]  # graded because of ``**`` only


def choose(
    changes: Collection[Change],
    before: Collection[str],
    modules: Collection[str],
    editable: Sequence[str] | None,
) -> Choice:
    """Return which changes are graded.

    ``before``: the files that the workspace had. ``modules``: the names that Python can
    import in the sandbox. ``editable``: see the module.
    """
    existing = _Existing(before)
    known = {_plain(name) for name in modules}
    patterns = [(_compiled(text), text.split("/")) for text in editable or ()]
    everything = editable is not None and "**" in editable
    graded: list[str] = []
    refused: list[str] = []
    risky: list[str] = []
    for change in changes:
        parts = change.name.split("/")
        risk = _risk(change, parts, existing, known)
        if change.mode == _REPOSITORY or (
            change.mode == LINK and _leaves(change) and editable is not None
        ):
            allowed = False
        elif editable is None:
            allowed = risk < 0 and existing.covers(change.name)
        elif everything:
            allowed = True
        else:
            allowed = any(
                names[: risk + 1] == parts[: risk + 1]
                and pattern.fullmatch(change.name)
                for pattern, names in patterns
            )
        (graded if allowed else refused).append(change.name)
        if allowed and everything and risk >= 0:
            risky.append(change.name)
    return Choice(graded=graded, refused=refused, risky=risky)


class _Existing:
    """The files and folders that a workspace had."""

    def __init__(self, files: Collection[str]) -> None:
        self.files = frozenset(files)
        self._folders = {""}
        for file in self.files:
            folder = posixpath.dirname(file)
            while folder not in self._folders:
                self._folders.add(folder)
                folder = posixpath.dirname(folder)

    def covers(self, name: str) -> bool:
        """Return whether a file existed, or is in a Python package that did."""
        if name in self.files:
            return True
        folder = posixpath.dirname(name)
        while folder:
            if f"{folder}/__init__.py" in self.files:
                return True
            folder = posixpath.dirname(folder)
        return False

    def n_known(self, parts: Sequence[str]) -> int:
        """Return how many of a path's parts are folders that existed."""
        n = 0
        while "/".join(parts[: n + 1]) in self._folders:
            n += 1
        return n


def _risk(
    change: Change, parts: Sequence[str], existing: _Existing, known: Collection[str]
) -> int:
    """The index of the last part of a path that makes it risky, or -1."""
    plain = [_plain(part) for part in parts]
    last = len(parts) - 1
    if change.mode == LINK or any(fnmatchcase(plain[-1], name) for name in _FILES):
        return last
    risk = -1
    for k, part in enumerate(plain):
        # not printable: also a byte that is not UTF-8
        odd = part.startswith(".") or not parts[k].isprintable()
        folder = k < last and any(fnmatchcase(part, name) for name in _FOLDERS)
        if odd or folder or (k == 0 < last and part in _ROOT_FOLDERS):
            risk = k
    importable = plain[-1].endswith(_MODULES)
    if importable and change.name not in existing.files:
        first = existing.n_known(parts)
        if not existing.covers(change.name):
            risk = max(risk, first)
        for k in range(first, len(parts)):
            if plain[k].partition(".")[0] in known:
                risk = k
    return risk


def _plain(name: str) -> str:
    """A name as a careless file system or importer may read it."""
    text = unicodedata.normalize("NFKC", name)
    return "".join(c for c in text if unicodedata.category(c) != "Cf").casefold()


def _leaves(change: Change) -> bool:
    """Whether a link leads out of the workspace, as far as its text says."""
    target = change.target
    if target is None or target.startswith("/"):
        return True
    folder = posixpath.dirname(change.name)
    path = posixpath.normpath(posixpath.join(folder, target))
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
