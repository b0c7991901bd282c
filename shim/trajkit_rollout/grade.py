"""The graded copy: which of an agent's changes it gets, and how tests run on it.

A git repository outside the workspace finds what the agent changed, unaffected by the
agent's own commits and branches. Committed, uncommitted, untracked and binary changes
form one patch, but for files in the workspace's own ``.gitignore``. Only in the copy that
is graded, where no agent was, is it decided what of the patch counts (`choose`;
docs/sandboxes.md has the rules). The tests are outside of it, and so is the program that
runs them and proves that they came to their end (`grader`).
"""

import importlib
import json
import math
import os
import posixpath
import re
import secrets
import shlex
import tempfile
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from trajkit_rollout.sandbox import CommandResult, Sandbox, pack, program
from trajkit_rollout.tasks import Task

_GIT_SECONDS = 300.0
# files are compared as bytes, whatever the workspace's attributes say
_ATTRIBUTES = b"* -text -ident -filter -working-tree-encoding\n"
_CHANGES = ("sh", "-c", program("changes.sh"), "sh")

_WHO = ("GIT_AUTHOR", "GIT_COMMITTER")
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


# exit codes of a shell that cannot run or find a command, or is killed
_NOT_RUN = (126, 127, -9)
_TESTBED = "/testbed"
_LOGS = "/logs/verifier"
_SCRIPT = 'exec python -I "$GRADER/run_tests.py" "$TESTS/"'
_GRADER = {
    name: files(__package__).joinpath("grader", name).read_bytes()
    for name in ("sitecustomize.py", "run_tests.py")
}
# of a grader's command: nothing is imported from folders that were not named
_SAFE = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PIP_CONFIG_FILE": "/dev/null",
    "UV_NO_CONFIG": "1",
}


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
        self.task, self.sandbox = task, sandbox
        self.path = sandbox.map_path(task.workdir)
        self._base = sandbox.map_path("/base.git")
        self._start = ""

    def prepare(self) -> None:
        """Put the task's files there, run its setup, and record the initial state."""
        setup = self.task.setup
        # an empty archive creates the directory
        self.sandbox.put(self.task.workspace or pack({}), self.path)
        if setup.command:
            command = ["sh", "-c", setup.command]
            done = self.sandbox.exec(command, timeout_s=setup.timeout_s, cwd=self.path)
            if done.code != 0:
                raise StageError("setup", done.summary)
        self._git("setup", "init")
        info = {"exclude": b".git~trajkit\n", "attributes": _ATTRIBUTES}
        self.sandbox.put(pack(info), f"{self._base}/info")
        self._start = self._git("setup", "tree").decode().strip()

    def diff(self) -> bytes:
        """Return the changes since `prepare`, as a patch; empty if there is none.

        Raises `AgentError`: git cannot make one of the files that the agent left.
        """
        return self._git("diff", "patch", error=AgentError)

    def apply(self, patch: bytes) -> dict[str, str]:
        """Apply those changes of a patch that are graded, and return `choose`'s answer.

        The patch is not trusted: what it changes is found out here. Raises `AgentError`:
        it cannot be applied.
        """
        if not patch:
            return {}
        # old mode, new mode, old hash, new hash, letter; name
        fields = _names(self._git("grade", "apply", patch, AgentError))
        facts = [text.split() for text in fields[::2]]
        after = dict(zip(fields[1::2], [(f[1], f[3]) for f in facts], strict=True))
        targets = self._targets(
            {n: h for n, (mode, h) in after.items() if mode == LINK}
        )
        changes = {name: (mode, targets.get(name)) for name, (mode, _) in after.items()}
        before = _names(self._git("grade", "list"))
        verdicts = choose(changes, before, self._modules(), self.task.editable)
        # what is removed first: a folder may become a file, and a file a folder
        graded = [name for name in after if verdicts[name] != "refused"]
        graded.sort(key=lambda name: after[name][0] != _REMOVED)
        lines = ("{} {}\t{}\0".format(*after[name], name) for name in graded)
        if graded:
            self._git("grade", "take", os.fsencode("".join(lines)), AgentError)
        return verdicts

    def _targets(self, links: Mapping[str, str]) -> dict[str, str]:
        hashes = "".join(f"{hash_}\n" for hash_ in links.values()).encode()
        printed = self._git("grade", "contents", hashes) if links else b""
        targets = {}
        for name in links:
            # hash, type and size; content
            head, _, printed = printed.partition(b"\n")
            size = int(head.split()[2])
            targets[name], printed = os.fsdecode(printed[:size]), printed[size + 1 :]
        return targets

    def _modules(self) -> list[str]:
        done = self.sandbox.exec(
            [*_CHANGES, "modules"],
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
        step: str,
        stdin: bytes = b"",
        error: type[StageError] = StageError,
    ) -> bytes:
        """The output of a step of ``programs/changes.sh``."""
        command = [*_CHANGES, step, self._start]
        env = {**_SETTINGS, "GIT_DIR": self._base, "GIT_WORK_TREE": self.path}
        done = self.sandbox.exec(
            command, timeout_s=_GIT_SECONDS, cwd=self.path, env=env, stdin=stdin
        )
        if done.code != 0:
            raise error(stage, f"git: {done.summary}")
        return done.stdout


def _names(printed: bytes) -> list[str]:
    return printed.decode(errors="surrogateescape").split("\0")[:-1]


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


def grade(workspace: Workspace, patch: bytes, *, finished: bool) -> float:
    """Return the reward by the task's grader; `StageError` if it cannot be graded.

    ``workspace``: the fresh copy with the agent's changes, without the task's tests.
    ``finished``: the agent ended by itself.
    """
    rules, sandbox = workspace.task.grade, workspace.sandbox
    if rules.kind == "completed":
        return float(finished)
    if rules.kind == "swebench":
        return _by_swebench(workspace, patch)
    done, proofs = _run(workspace)
    if rules.kind == "command":
        # it succeeded, and so did each test runner
        return float(done.code == 0 and all(proof["code"] == 0 for proof in proofs))
    if rules.kind == "tests":
        return _by_names(workspace, done, proofs)
    if rules.kind == "script":
        if done.code != 0:
            raise StageError("grade", rules.script, done.summary)
        last = CommandResult(0, done.stdout).last_line
        return _reward(f"{rules.script}: its last line", last)
    for name in ("reward.txt", "reward.json"):
        text = sandbox.get(sandbox.map_path(f"{_LOGS}/{name}"))
        if text is not None:
            return _reward(name, text.decode(errors="replace"))
    raise StageError("grade", f"the verifier wrote no reward: {done.summary}")


def _by_names(
    workspace: Workspace, done: CommandResult, proofs: Sequence[Mapping[str, Any]]
) -> float:
    rules, results = workspace.task.grade, dict[str, bool]()
    for proof in proofs:
        # one with several results passed if all of them did
        for name, passed in (proof["results"] or {}).items():
            results[name] = results.get(name, True) and passed
    if not results:
        raise StageError("grade", f"no result of pytest or unittest: {done.summary}")
    wanted = rules.fail_to_pass + rules.pass_to_pass
    share = sum(results.get(name, False) for name in wanted) / len(wanted)
    return share if rules.partial else float(share == 1.0)


def _by_swebench(workspace: Workspace, patch: bytes) -> float:
    """1 if SWE-bench's own harness reports the instance as resolved.

    It runs the script and uses the log parser of swebench 5.0. The sandbox needs the
    instance's image.
    """
    if find_spec("swebench") is None:
        raise StageError("grade", "swebench is not installed: pip install swebench")
    # an optional package without types
    specs: Any = importlib.import_module("swebench.harness.utils")
    grading: Any = importlib.import_module("swebench.harness.grading")
    if workspace.path != _TESTBED:
        rule = f"the workspace is {workspace.path}, and must be {_TESTBED} of an image"
        raise StageError("grade", rule)
    try:
        spec = specs.make_test_spec(dict(workspace.task.grade.instance))
    except (KeyError, ValueError) as error:
        raise StageError("grade", f"the instance is incomplete: {error!r}") from error
    folder = workspace.sandbox.map_path("/trajkit")
    workspace.sandbox.put(pack({"eval.sh": spec.eval_script.encode()}), folder)
    prediction = {
        "instance_id": spec.instance_id,
        "model_name_or_path": "trajkit",
        "model_patch": patch.decode(errors="replace"),
    }
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "test_output.txt"
        _exec(workspace, ["bash", f"{folder}/eval.sh"], "eval.sh", log=log)
        reports = grading.get_eval_report(
            test_spec=spec,
            prediction=prediction,
            test_log_path=str(log),
            include_tests_status=False,
        )
    report = reports[spec.instance_id]
    if report.get("infra_failure"):
        raise StageError("grade", f"swebench: {report.get('infra_failure_reason')}")
    return float(report["resolved"])


def _run(workspace: Workspace) -> tuple[CommandResult, list[Mapping[str, Any]]]:
    """Run the task's grader; return how it ended, and what test runners proved.

    Raises `StageError`: it could not be run, or a test runner did not come to its end.
    """
    sandbox, task, rules = workspace.sandbox, workspace.task, workspace.task.grade
    given = {"tests": "/tests", "grader": "/trajkit", "logs": _LOGS}
    places = {key: sandbox.map_path(path) for key, path in given.items()}
    places["workspace"] = cwd = workspace.path
    tests = places["workspace" if rules.in_workspace else "tests"]
    sandbox.put(pack({}), places["logs"])  # creates the directory
    if task.tests is not None:
        sandbox.put(task.tests, tests)
        cwd = cwd if rules.kind in ("script", "reward_file") else tests
    nonce = secrets.token_hex(16).encode()
    own = {"nonce": nonce, "places": f"{tests}\n{workspace.path}".encode()}
    sandbox.put(pack({**_GRADER, **own}), places["grader"])
    env = {
        **_SAFE,
        **{key.upper(): place for key, place in places.items()},
        "PYTHONPATH": places["grader"],
        "PYTEST_ADDOPTS": " ".join(f"-p {plugin}" for plugin in rules.plugins),
    }
    command = rules.command
    if rules.kind == "reward_file":
        command = command or "bash {tests}/test.sh"
        # a verifier chooses its plugins; none of the workspace is found in time
        del env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    if rules.kind == "script":
        command = _SCRIPT + shlex.quote(rules.script)
    for key, place in places.items():
        command = command.replace(f"{{{key}}}", place)
    name = rules.script or command
    done = _exec(workspace, ["sh", "-c", command], name, cwd=cwd, env=env)
    if done.code in _NOT_RUN:
        raise StageError("grade", name, done.summary)
    if sandbox.get(f"{places['grader']}/nonce") != nonce:
        reason = "a test process ended before its tests did"
        raise StageError("grade", name, reason, done.summary)
    proofs, changed = [], list[Any]()
    try:
        for line in (sandbox.get(f"{places['grader']}/results") or b"").splitlines():
            proofs.append(proof := json.loads(line))
            changed += proof["changed"][:3]
            if proof["nonce"] != nonce.decode():
                raise ValueError
    except (ValueError, TypeError, LookupError, RecursionError):
        raise StageError("grade", "the file of test results was changed") from None
    if changed:
        names = ", ".join(map(str, changed))
        raise StageError("grade", name, f"changed while tests ran: {names}")
    return done, proofs


def _exec(
    workspace: Workspace, command: list[str], name: str, **options: Any
) -> CommandResult:
    seconds = workspace.task.grade.timeout_s
    options = {"cwd": workspace.path, **options}
    done = workspace.sandbox.exec(command, timeout_s=seconds, **options)
    if done.code is None:
        raise AgentError("grade", name, f"timed out after {seconds:g} s")
    return done


def _reward(name: str, text: str) -> float:
    """The reward in a text: a number, an object with ``reward``, or one of numbers.

    Of an object of numbers the mean counts, as in Polar's
    https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/bac80ae/src/polar/trajectory/evaluator/harbor.py
    """
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else fmean(value.values())
        if isinstance(value, bool) or not math.isfinite(value):
            raise ValueError("not a finite number")
        return float(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = f"{name} is {text.strip()[:80]!r}: {error}"
        raise StageError("grade", reason) from error
