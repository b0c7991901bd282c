"""The graded copy: which of an agent's changes it gets, and how tests run on it.

A git repository outside the workspace makes one patch of what the agent changed, whatever
its own commits are. Only in the copy that is graded, where no agent was, is it decided
what of the patch counts (`choose`; docs/sandboxes.md has the rules). Outside of it are the
tests, and the program that runs them and proves that they came to their end (`grader`).
"""

import hashlib
import importlib
import json
import math
import os
import re
import secrets
import tarfile
import tempfile
import unicodedata
from ast import literal_eval
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import lru_cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trajkit_rollout.sandbox import CommandResult, Sandbox, program
from trajkit_rollout.tasks import Task, pack

_GIT_SECONDS = 300.0
_WHO = ("GIT_AUTHOR", "GIT_COMMITTER")
_IDENTITY = {f"{who}_NAME": "agent" for who in _WHO}
_IDENTITY |= {f"{who}_EMAIL": "agent@localhost" for who in _WHO}
# a compiled module would be a change
AGENT_ENV = {**_IDENTITY, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment of every agent."""

LINK = "120000"
"""Git's mode of a symbolic link."""
_FILE, _REPOSITORY, _GONE = "100644", "160000", "000000"


def _names(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns.split())))


# names of files, whichever folder they are in: settings of Python, of other languages
# and of build tools; tests
_FILES = _names("""
conftest.py sitecustomize.py usercustomize.py *.pth *.egg-link pytest.ini pytest.toml
tox.ini tox.toml noxfile.py setup.py setup.cfg pyproject.toml pyvenv.cfg uv.toml *.lock
*.py[cod] requirements*.txt constraints*.txt entry_points.txt manage.py
makefile* gnumakefile* *.mk *.mak cmakelists.txt *.cmake ctest* meson.build justfile
package.json package-lock.json npm-shrinkwrap.json pnpm-* deno.json* bunfig.toml
*.config.* *.conf.[jt]s [jt]sconfig*.json cargo.toml build.rs rust-toolchain* go.mod go.sum
go.work* gemfile* rakefile pom.xml mvnw* build.gradle* settings.gradle* gradle* build.xml
build.sbt phpunit.xml* composer.json mix.exs dockerfile* run_tests* runtests* test.py
tests.py test_*.* *_test.* *_spec.* *.test.* *.spec.[cjmt]* *test.java *tests.java
*test.php *tests.cs *.snap *.ambr
""")
# names of folders; hidden ones are risky too
_FOLDERS = _names("""
tests testdata __tests__ __mocks__ __fixtures__ __snapshots__ __pycache__ *.dist-info
*.egg-info *.egg site-packages dist-packages node_modules vendor
""")
# at the root, in a folder src, or in a project's folder, which has one of these files
_ROOT_FOLDERS = ("test", "spec", "specs", "testing")
_PROJECTS = _names("package.json pyproject.toml setup.py cargo.toml go.mod pom.xml")
_VARIABLE = re.compile(r"\$\{(\w+)(:-(.*))?\}", re.DOTALL)
_WILDCARDS = {"*": "[^/]*", "?": "[^/]"}
# what Python can import
_MODULES = (".py", ".pyc", ".so", ".pyd", ".pth", ".zip")

# exit codes of a shell that cannot run or find a command, or is killed
_NOT_RUN, _MAX_DOUBTS = (126, 127, -9), 9
_SKIPPED, _CHANGED = "skipped: ", "changed while tests ran: "
# a line of a shell program that runs tests
_RUNNER = re.compile(
    r"^(?!\s*#)(?!.*\binstall\b).*(\bpytest|-\w*m\s*(?:py|unit)test)\b", re.MULTILINE
)
# what is odd in the tests without an agent's changes, by kind of sandbox and task
_BASES: dict[tuple[str, str], set[str]] = {}
_TESTBED, _LOGS = "/testbed", "/logs/verifier"
_GRADER = files(__package__).joinpath("grader/sitecustomize.py").read_bytes()


class StageError(Exception):
    """A stage of a rollout (sandbox, setup, harness, diff or grade) failed."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class AgentError(StageError):
    """A stage failed, and only what the agent did can be the reason."""


class TaskError(StageError):
    """A stage failed, and what the agent did cannot be the reason."""


class Proof(NamedTuple):
    """What one test runner reported."""

    code: int
    # names of tests, those in ``skipped`` also if they failed as expected
    passed: list[str]
    failed: list[str]
    skipped: list[str]
    changed: list[str]  # what was exchanged while it ran
    inner: str  # the secret that the runners which it started left, or empty
    printed: str  # by a script, at its end


class Workspace:
    """The workspace of a task in a sandbox; `StageError`: the task or git failed."""

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self.task, self.sandbox = task, sandbox
        self.path, self._base = map(sandbox.map_path, (task.workdir, "/base.git"))
        # the tree of the initial state, its files, and those that an agent changed
        self._start, self._files, self._changed = "", list[str](), set[str]()

    def prepare(self) -> None:
        """Put the task's files there, run its setup, and record the initial state."""
        setup = self.task.setup
        # an empty archive creates the directory
        self.sandbox.put(self.task.workspace or pack({}), self.path)
        if setup.command:
            self.shell("setup", setup.command, setup.timeout_s)
        self._start, _, names = os.fsdecode(self._git("init")).partition("\n")
        self._files = names.split("\0")[:-1]

    def shell(
        self, stage: str, command: str, timeout_s: float, env: Mapping[str, str] = {}
    ) -> None:
        """Run a command of the task in the workspace."""
        shell, place = ["sh", "-c", command], self.path
        done = self.sandbox.exec(shell, timeout_s=timeout_s, cwd=place, env=env)
        if done.code != 0:
            raise StageError(stage, done.summary)

    def diff(self) -> bytes:
        """Return the changes since `prepare`, as a patch; empty if there is none."""
        return self._git("patch")

    def apply(self, patch: bytes) -> dict[str, str]:
        """Apply those changes of a patch that are graded, and return `choose`'s answer.

        The patch is not trusted: what it changes is found out here.
        """
        if not patch:
            return {}
        # old mode, new mode, old hash, new hash, letter; name
        fields = os.fsdecode(self._git("apply", patch)).split("\0")[:-1]
        facts = [text.split() for text in fields[::2]]
        after = dict(zip(fields[1::2], [(f[1], f[3]) for f in facts], strict=True))
        links = {name: hash_ for name, (mode, hash_) in after.items() if mode == LINK}
        hashes = "".join(f"{hash_}\n" for hash_ in links.values()).encode()
        contents = self._git("contents", hashes) if links else b""
        decoded = (os.fsdecode(b64decode(line)) for line in contents.splitlines())
        targets = dict(zip(links, decoded, strict=True))
        changes = {name: (mode, targets.get(name)) for name, (mode, _) in after.items()}
        modules = self._git("modules").decode(errors="replace").split()
        verdicts = choose(changes, self._files, modules, self.task.editable)
        graded = [name for name in after if verdicts[name] != "refused"]
        lines = ("{} {}\t{}\0".format(*after[name], name) for name in graded)
        if graded:
            self._git("take", os.fsencode("".join(lines)))
        self._changed.update(graded)
        return verdicts

    def tests(self) -> list[str]:
        """Return the files that can change how tests run, and that no agent changed."""
        kept = dict.fromkeys(self._files, (_FILE, None))
        verdicts = choose(kept, self._files, (), None).items()
        return [n for n, v in verdicts if v == "refused" and n not in self._changed]

    def _git(self, step: str, stdin: bytes = b"") -> bytes:
        command = ["sh", "-c", program("changes.sh"), "sh", step, self._start]
        env = {**_IDENTITY, "GIT_DIR": self._base, "GIT_WORK_TREE": self.path}
        done = self.sandbox.exec(
            command, timeout_s=_GIT_SECONDS, cwd=self.path, env=env, stdin=stdin
        )
        if done.code != 0:
            stage = {"init": "setup", "patch": "diff"}.get(step, "grade")
            error = AgentError if step in ("patch", "apply", "take") else StageError
            raise error(stage, f"git: {step}: {done.summary}")
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
    that makes it so, or the pattern ``**``. ``changes``: git's mode of each changed file
    and the target of a symbolic link. ``before``, ``modules``: the files that the workspace
    had, and the names that Python can import. ``editable``: see `Task`; None: files that
    the workspace had, and new ones inside its Python packages.
    """
    files, known = frozenset(before), {_plain(name) for name in modules}
    folders = {folder for file in files for folder in _folders(file)}
    packages = {folder for folder in folders if f"{folder}/__init__.py" in files}
    environments = {folder for folder in folders if f"{folder}/pyvenv.cfg" in files}
    pairs = [name.rpartition("/") for name in files]
    projects = {folder for folder, _, last in pairs if _PROJECTS.match(_plain(last))}
    after = files.union(name for name, (mode, _) in changes.items() if mode != _GONE)
    patterns = [(_compiled(text), text.split("/")) for text in editable or ()]
    everything = editable is not None and "**" in editable

    # the index of the last part of a path that makes it risky, or -1; and whether the
    # workspace had the file, or a package that it is in
    def assess(name: str, mode: str, parts: list[str]) -> tuple[int, bool]:
        last, plain = len(parts) - 1, _plain(parts[-1])
        risks, covered, first = [-1], name in files, 0
        while first < last and (folder := "/".join(parts[: first + 1])) in folders:
            covered = covered or folder in packages
            if folder in environments:
                risks.append(first)
            first += 1
        # a file in place of a folder, or a folder in place of a file, removes others
        replaced = first < last and "/".join(parts[: first + 1]) in files
        replaced = replaced or name in folders
        if mode == LINK or replaced or _FILES.match(plain) or _is_odd(parts[-1]):
            return last, covered
        # each part is looked up, for paths may be long and many
        risks += [k for k in range(last) if _is_risky(parts[k])]
        for k in range(last):
            if _plain(parts[k]) in _ROOT_FOLDERS:
                above = "/".join(parts[:k])
                if k == 0 or parts[k - 1] == "src" or above in projects:
                    risks.append(k)
        # in a package's folder a name hides none of Python's
        inside = covered and f"{name.rpartition('/')[0]}/__init__.py" in after
        if plain.endswith(_MODULES) and name not in files and not inside:
            stems = [_plain(part).partition(".")[0] for part in parts]
            risks += [k for k in range(first, len(parts)) if stems[k] in known]
            risks += [] if covered else [first]
        return max(risks), covered

    verdicts = {}
    for name, (mode, target) in changes.items():
        parts = name.split("/")
        k, covered = assess(name, mode, parts)
        if mode == _REPOSITORY or (mode == LINK and _leaves(name, target)):
            allowed = False
        elif editable is None:
            allowed = k < 0 and covered
        else:
            allowed = everything or any(
                names[: k + 1] == parts[: k + 1] and pattern.fullmatch(name)
                for pattern, names in patterns
            )
        risky = "risky" if everything and k >= 0 else "graded"
        verdicts[name] = risky if allowed else "refused"
    return verdicts


def _folders(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:k]) for k in range(1, len(parts))]


@lru_cache(1 << 16)
def _plain(name: str) -> str:
    # as a careless file system or importer may read it
    if name.isascii():
        return name.lower()
    text = unicodedata.normalize("NFKC", name)
    return "".join(c for c in text if unicodedata.category(c) != "Cf").casefold()


@lru_cache(1 << 16)
def _is_odd(part: str) -> bool:
    # hidden or not printable: also a byte that is not UTF-8
    return _plain(part).startswith(".") or not part.isprintable()


@lru_cache(1 << 16)
def _is_risky(folder: str) -> bool:
    return _is_odd(folder) or _FOLDERS.match(_plain(folder)) is not None


def _leaves(name: str, target: str | None) -> bool:
    # out of the workspace; a folder before .. may be another link
    parts = [part for part in (target or "/").split("/") if part != "."]
    n_up = next((k for k, part in enumerate(parts) if part != ".."), len(parts))
    inner = {"", "..", ".git"}.intersection(parts[n_up:])
    return bool(inner) or n_up > name.count("/")


def _compiled(pattern: str) -> re.Pattern[str]:
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

    ``workspace``: a fresh copy with the changes. ``finished``: the agent ended by itself.
    """
    rules = workspace.task.grade
    if rules.kind == "completed":
        return float(finished)
    if rules.kind == "swebench":
        return _by_swebench(workspace, patch)
    done, proofs, doubts = _run(workspace)
    if any(doubt.startswith(_CHANGED) for doubt in doubts):
        _compare_with_base(workspace, doubts)
    reward = _reward_of(workspace, done, proofs)
    texts = _files_of(workspace.task.tests).values()
    named = _RUNNER.search("\n".join((rules.command, *texts)))
    if reward > 0 and named and not proofs:
        rule = "it must run with Python 3.8, and the PYTHONPATH that graders get"
        raise StageError("grade", f"{named[1]} reported no results: {rule}")
    # of the tests that a task names, one that was skipped has not passed
    if reward > 0 and rules.kind != "tests":
        _compare_with_base(workspace, doubts)
    return reward


def _compare_with_base(workspace: Workspace, doubts: set[str]) -> None:
    """Raise `AgentError` for what does not happen without the agent's changes, too."""
    task, sandbox = workspace.task, workspace.sandbox
    key, why = (sandbox.kind, replace(task, prompt="").digest()), ""
    if doubts and key not in _BASES:
        name = f"{sandbox.spec.name}-base"
        try:
            with type(sandbox)(replace(sandbox.spec, name=name)) as fresh:
                base = Workspace(task, fresh)
                base.prepare()
                _, _, _BASES[key] = _run(base)
        except StageError as error:
            # an agent could choose to be compared with what cannot be graded
            why = f"; nothing is known of the base commit: {error}"
    if own := doubts - _BASES.get(key, set()):
        shown = "; ".join(sorted(own)[:_MAX_DOUBTS])
        raise AgentError("grade", f"not without the agent's changes: {shown}{why}")


def _reward_of(
    workspace: Workspace, done: CommandResult, proofs: Sequence[Proof]
) -> float:
    rules, sandbox = workspace.task.grade, workspace.sandbox
    if rules.kind == "command":
        # it succeeded, and so did each test runner
        return float(done.code == 0 and all(proof.code == 0 for proof in proofs))
    if rules.kind == "tests":
        passed = {name for proof in proofs for name in proof.passed}
        others = {name for proof in proofs for name in proof.failed + proof.skipped}
        if not passed | others:
            reason = f"no result of pytest or unittest: {done.summary}"
            raise StageError("grade", reason)
        # one with several results passed if all of them did
        passed -= others
        wanted = rules.fail_to_pass + rules.pass_to_pass
        share = fmean(name in passed for name in wanted)
        return share if rules.partial else float(share == 1.0)
    if rules.kind == "script":
        if done.code != 0:
            raise StageError("grade", rules.script, done.summary)
        # what the programs print that it starts, and leaves, does not count
        printed = "".join(proof.printed for proof in proofs).encode()
        last = CommandResult(0, printed or done.stdout).last_line
        return _reward(f"{rules.script}: its last line", last)
    rewards = {}
    for name in ("reward.txt", "reward.json"):
        text = sandbox.get(sandbox.map_path(f"{_LOGS}/{name}"))
        if text is not None:
            rewards[_reward(name, text.decode(errors="replace"))] = name
    if len(rewards) != 1:
        what = "two different rewards" if rewards else "no reward"
        raise StageError("grade", f"the verifier wrote {what}: {done.summary}")
    ((reward, name),) = rewards.items()
    if reward >= 1 and any(proof.code for proof in proofs):
        raise StageError("grade", f"{name} is {reward:g}, but tests failed")
    return reward


def _files_of(tests: bytes | None) -> dict[str, str]:
    """The files of the tests by name, with the texts of shell programs."""
    with tarfile.open(fileobj=BytesIO(tests or pack({}))) as tar:
        texts = {}
        for entry in tar:
            if file := tar.extractfile(entry):
                read = entry.name.endswith(".sh")
                text = file.read().decode(errors="replace") if read else ""
                texts[os.path.normpath(entry.name)] = text
        return texts


def _by_swebench(workspace: Workspace, patch: bytes) -> float:
    """1 if SWE-bench's own harness (swebench 5.0) reports the instance as resolved."""
    try:
        # an optional package without types
        specs: Any = importlib.import_module("swebench.harness.utils")
        grading: Any = importlib.import_module("swebench.harness.grading")
        spec = specs.make_test_spec(dict(workspace.task.grade.instance))
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed: pip install swebench"
        raise TaskError("grade", reason) from None
    except (KeyError, ValueError) as error:
        raise TaskError("grade", f"the instance is incomplete: {error!r}") from error
    if workspace.path != _TESTBED:
        rule = f"the workspace is {workspace.path}, and must be {_TESTBED} of an image"
        raise TaskError("grade", rule)
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
        try:
            # the package reads text, and code under test may print any bytes
            log.write_text(log.read_text("utf-8", "replace"), "utf-8")
            report = grading.get_eval_report(
                test_spec=spec,
                prediction=prediction,
                test_log_path=str(log),
                include_tests_status=False,
            )[spec.instance_id]
        except Exception as error:
            raise StageError("grade", f"swebench: {error!r}") from error
    if report.get("infra_failure"):
        raise StageError("grade", f"swebench: {report.get('infra_failure_reason')}")
    return float(report["resolved"])


def _run(workspace: Workspace) -> tuple[CommandResult, list[Proof], set[str]]:
    """Run the task's grader.

    Returns how it ended, what test runners proved, and what may have kept tests from
    failing.
    """
    sandbox, task, rules = workspace.sandbox, workspace.task, workspace.task.grade
    given = {"tests": "/tests", "grader": "/trajkit", "logs": _LOGS}
    places = {key: sandbox.map_path(path) for key, path in given.items()}
    places["workspace"] = cwd = workspace.path
    tests = places["workspace" if rules.in_workspace else "tests"]
    for place in (places["logs"], tests):
        sandbox.put(pack({}), place)  # creates the directory
    if task.tests is not None:
        sandbox.put(task.tests, tests)
        cwd = cwd if rules.kind in ("script", "reward_file") else tests
    # those of the workspace by their path from the tests, after a dot
    root, names = os.path.relpath(workspace.path, tests), [*_files_of(task.tests)]
    theirs = [os.path.join(root, name) for name in workspace.tests()]
    nonce, both = secrets.token_hex(32), (*names, *theirs)
    # a name with the end of a line is no module's
    lines = [tests, workspace.path, *(name for name in both if "\n" not in name)]
    own = {"sitecustomize.py": _GRADER, "nonce": nonce.encode()}
    own["places"] = os.fsencode("\n".join(lines))
    sandbox.put(pack(own), places["grader"])
    command = rules.script if rules.kind == "script" else rules.command
    command = command or "bash {tests}/test.sh"
    for key, place in places.items():
        command = command.replace(f"{{{key}}}", place)
    env = variables(rules.env) | {k.upper(): place for k, place in places.items()}
    shell = ["sh", "-c", program("grade.sh"), "sh", rules.kind, command]
    folders = {str(folder) for name in names for folder in Path(name).parents}
    found = places["logs"], places["grader"], tests, root, *sorted(folders)
    read = ["sh", "-c", program("tests.sh"), "sh", *found]
    listed = os.fsencode("".join(f"{name}\0" for name in both))

    def hashes() -> set[str]:
        done = _exec(workspace, read, "tests", stdin=listed)
        return set(done.stdout.decode(errors="replace").splitlines())

    before = hashes()
    if len(before) < 2:
        raise TaskError("grade", "files cannot be read by xargs, stat and sha256sum")
    done = _exec(workspace, [*shell, *rules.plugins], command, cwd=cwd, env=env)
    if done.code in _NOT_RUN:
        raise StageError("grade", command, done.summary)
    after = hashes()
    printed = sandbox.get(f"{places['grader']}/results") or b""
    last = sandbox.get(f"{places['grader']}/nonce")
    proofs, inner = list[Proof](), _sha256(f"inner {nonce}")
    try:
        for line in printed.decode("ascii").splitlines():
            signature, _, text = line.partition(" ")
            pair = (nonce, inner)
            (secret,) = (s for s in pair if signature == _sha256(f"{s}{text}{s}"))
            proof, following = Proof(*literal_eval(text)), _sha256(f"next {secret}")
            if secret == nonce:
                proofs.append(proof)
                if proof.inner not in ("", inner):
                    break
                nonce, inner = following, _sha256(f"inner {following}")
            else:
                # the program that started this one could have told it, too
                proofs.append(proof._replace(passed=[]))
                inner = following
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise StageError("grade", "the file of test results was changed") from None
    if last != nonce.encode():
        reason = "a test process ended before its tests did"
        raise StageError("grade", command, reason, done.summary)
    # the names of files that have another hash, are new or are gone
    changed = [line.partition("  ")[2] for line in before ^ after]
    changed += [name for proof in proofs for name in proof.changed]
    doubts = {f"{_SKIPPED}{name}" for proof in proofs for name in proof.skipped}
    return done, proofs, doubts | {f"{_CHANGED}{name}" for name in changed}


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """The values of a task's variables, by the rule of Harbor's ``verifier.env``."""
    values = {}
    for name, text in given.items():
        found = _VARIABLE.fullmatch(text)
        value = os.environ.get(found[1], found[3]) if found else text
        if value is None:
            raise TaskError("grade", f"{name} = {text!r}, which is not set here")
        values[name] = value
    return values


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
