"""What several commands have: types of parameters, policies, readers, tokenizers, printing.

A command's signature gives the types and defaults of its options, its numpydoc docstring
their help. An option of several commands is here with its help. Only this module imports
tokenizers and transformers.
"""

import inspect
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_origin, get_type_hints

import pyarrow as pa
from cyclopts import Parameter, Token
from cyclopts.validators import Number

import trajkit as tk
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.analysis.words import count
from trajkit.cli import STANDARD, STANDARD_FILES, shown
from trajkit.cli.screen import Progress, text_table
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError, LeftOutWarning
from trajkit.files.formats import format_of
from trajkit.files.run import Watch, run
from trajkit.files.sources import (
    Input,
    Paths,
    SessionPrefix,
    check_outputs,
    inputs_of,
    local_files,
    paths_of,
    turns_inputs,
)
from trajkit.files.tables import Log, SessionIndex, sessions_below
from trajkit.importers.formats import ChatTokenizer
from trajkit.importers.reader import advised
from trajkit.policies import ALIASES, NAMED_CHOICES, PRESETS, RULES, rule_of
from trajkit.tables.columns import take_session

# transformers would advise to install PyTorch, which is not needed here
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class Reads(NamedTuple):
    """Marks what is read: a kind of table or file, and the suffixes in directories."""

    kind: str
    suffixes: tuple[str, ...] = ()


class Writes(NamedTuple):
    """Marks an output: the kind of table or file, and its format on standard output."""

    kind: str
    piped: str = "jsonl"


TOKENIZER = Reads("tokenizer", (".json", ".jinja", ".model"))
_BY_SUFFIX = "Parquet, Arrow IPC or JSONL, by suffix; - is standard output"
_PARTS = "; DIRECTORY/ gets parts, where an interrupted run continues"
_OUT = partial(Parameter, name=("--out", "-o"), allow_leading_hyphen=True)
OUT, FILE, PARTS = _OUT(), _OUT(help=_BY_SUFFIX), _OUT(help=_BY_SUFFIX + _PARTS)
Count = Annotated[int, Parameter(validator=Number(gte=1))]
Json = Annotated[bool, Parameter(help="print one JSON object and nothing else")]
NoClobber = Annotated[bool, Parameter(help="replace no existing file")]
Source = Annotated[
    list[str],
    Parameter(
        help="Parquet, Arrow IPC or JSON by suffix, directories of them, or patterns; - is "
        "standard input"
    ),
    Reads("turns"),
]
Rows = Annotated[
    str,
    Parameter(help="rows, in a file or a directory; - is standard input"),
    Reads("rows"),
]
SessionsFile = Annotated[
    str | None,
    Parameter(
        name="--sessions",
        help="a line per session: session_id, reward, group_id, error; Parquet, Arrow IPC "
        "or JSONL by suffix, or the directory of a run. A session with an error is not "
        "trained",
    ),
    Reads("sessions"),
]
Reward = Annotated[
    float | None, Parameter(help="the reward of every session, instead of --sessions")
]
TokenizerPath = Annotated[
    str | None,
    Parameter(
        name="--tokenizer",
        help="the model's tokenizer.json, or its directory (default: that in the directory "
        "of the run)",
    ),
    TOKENIZER,
]
Session = Annotated[str | None, Parameter(help="one session (default: all)")]
MaxRowTokens = Annotated[Count | None, Parameter(help="truncate longer rows")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a log of turns is read.

    Attributes
    ----------
    session_prefix
        Put the path of its file, or of its folder, before each session id, where files
        number their sessions alike; no: files with one id continue one another (default:
        calls that start over in another file are an error).
    nonfinite_logprobs
        Invalid logprobs (NaN, -9999): an error, or null.
    """

    session_prefix: SessionPrefix | None = None
    nonfinite_logprobs: Literal["raise", "null"] = "raise"

    def turns(self, source: Paths, session: str | None = None) -> pa.Table:
        """The turns of one session or all, without sessions that break a rule.

        Those are reported on stderr. No calls, and no valid session, are errors.
        """
        table = pa.concat_tables([*self.pieces(source)], promote_options="default")
        return table if session is None else take_session(table, session)

    def pieces(
        self,
        source: Paths,
        left_out: list[str] | None = None,
        *,
        empty: bool = False,
        bodies: bool = True,
    ) -> Iterator[pa.Table]:
        """`turns` in tables of complete sessions; ``left_out`` gets the ids of the others.

        With ``empty``, there may be no call; without ``bodies``, messages need none.
        """
        prefix, nonfinite = self.session_prefix, self.nonfinite_logprobs
        log = Log(source, None, nonfinite, True, None, prefix, bodies=bodies)
        index = log.index()
        if not index.n_turns and not empty:
            raise nothing(source)
        n_good, rejected = 0, dict[str, str]()
        with Progress("read", "turns") as bar:
            bar.begin(index.n_turns)
            for piece in log.pieces(index):
                rejected |= piece.rejected
                n_good += piece.turns.num_rows
                bar.count(piece.n_turns)
                yield piece.turns
        for k, (name, text) in enumerate(rejected.items()):
            reason = InvalidTurnsError(text)
            # the files are searched for the lines of the first few
            reason = log.placed(reason) if k < 10 else reason
            if not n_good:
                raise reason
            words = f"session {name!r} is left out: {reason}"
            warnings.warn(words, LeftOutWarning, stacklevel=2)
        if left_out is not None:
            left_out += rejected


READING = Reading()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job(Reading):
    """How a log of turns is read that may be larger than memory, and what is printed.

    Attributes
    ----------
    rejected
        Leave out sessions that break a rule, and write them to this file with the reason
        (default: the first one is an error).
    """

    rejected: Annotated[str | None, Writes("rejected")] = None
    json: Json = False
    no_clobber: NoClobber = False

    def run(
        self,
        name: str,
        source: Paths,
        *args: Any,
        **more: Any,
    ) -> dict[str, int]:
        """Call `trajkit.run`; returns the totals."""

        def begins(index: SessionIndex, done: int) -> None:
            if not index.n_turns:
                raise nothing(source)
            bar.begin(index.n_turns, done)

        with Progress(name, "turns") as bar:
            return run(
                source,
                *args,
                rejected=self.rejected,
                nonfinite_logprobs=self.nonfinite_logprobs,
                session_prefix=self.session_prefix,
                watch=Watch(begins, bar.count),
                **more,
            )

    def print(self, totals: dict[str, int], facts: dict[str, Any], text: str) -> None:
        """Print facts as JSON, or the text, and the number of rejected sessions."""
        if "rejected" in totals:
            n = totals["rejected"]
            facts = {**facts, "rejected": n}
            text = f"{count(n, 'session')} rejected, see {self.rejected}\n{text}"
        print_result(facts, text, self.json)


JOB = Job()


def print_text(text: str) -> None:
    """Print text on standard output."""
    sys.stdout.write(f"{shown(text)}\n")


def print_result(facts: object, text: str, json: bool) -> None:
    """Print facts as one JSON object, or text for people."""
    print_text(dumps(facts) if json else text)


def facts_of(sessions: str | None, reward: float | None) -> dict[str, Any]:
    """The arguments ``sessions`` and ``reward`` of functions; they exclude each other."""
    if sessions is not None and reward is not None:
        raise ArgumentError("--reward: not allowed with --sessions, which has rewards")
    return {"sessions": known_sessions(sessions), "reward": reward}


def known_sessions(
    file: str | None, run: Paths | None = None, prefix: SessionPrefix | None = None
) -> pa.Table | None:
    """The table of sessions in a file, else that in the directory of a run."""
    if file is not None:
        return tk.read_sessions(file)
    return None if run is None else sessions_below(run, prefix)


def read_rows(path: str) -> pa.Table:
    """The rows of a file or directory; no row at all is an error."""
    rows = tk.read_rows(path)
    if not rows.num_rows:
        raise nothing(path, "rows")
    return rows


def nothing(source: Paths, what: str = "calls") -> InvalidTurnsError:
    """The error of an input without a line; a torn call gives its warning first."""
    if what == "calls":
        with suppress(tk.TrajkitError):
            tk.read_turns(source)
    names = ", ".join(map(str, source if isinstance(source, list) else [source]))
    return InvalidTurnsError(f"{names}: no {what}, nothing to do")


def chosen_tokenizer(path: str | None, turns: Paths) -> Tokenizer | None:
    """The tokenizer of ``--tokenizer``, else that of the run; None if there is none."""
    if path is not None:
        return load_tokenizer(Path(path))
    for source in paths_of(turns) or []:
        folder = source if source.is_dir() else source.parent
        # only in the directory of a run: elsewhere it may be that of another model
        is_run = any(folder.glob("turns-*.arrows")) and find_spec("tokenizers")
        if is_run and (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder / "tokenizer.json")
    return None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` or of a model's directory.

    tokenizers loads a directory with a ``tokenizer.json``, transformers any other.
    """
    if not path.exists():
        raise FormatError(
            f"--tokenizer {path}: there is no such file or folder. Nothing is downloaded: "
            "give the model's local folder, or its tokenizer.json"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return cast("Tokenizer", _from_directory(path))
    from tokenizers import Tokenizer as Fast

    content = file.read_bytes()
    try:
        return cast("Tokenizer", Fast.from_buffer(content))
    # tokenizers raises bare Exceptions
    except Exception as error:
        raise FormatError(f"{file}: not a tokenizer: {error}") from error


def load_chat_tokenizer(path: Path, template: str | None) -> ChatTokenizer:
    """A tokenizer with its chat template, or with the one in a file."""
    fast = None if path.is_dir() else load_tokenizer(path)
    import transformers

    make: Any = transformers.PreTrainedTokenizerFast
    read = _from_directory(path) if fast is None else make(tokenizer_object=fast)
    if template is not None:
        read.chat_template = Path(template).read_text("utf-8")
    return cast("ChatTokenizer", read)


def _from_directory(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path}: not a tokenizer: {error}") from error


def call(command: Callable[..., int | None], bound: inspect.BoundArguments) -> int:
    """Run a command on its files; returns the exit code.

    ``-`` and addresses become temporary files. ArgumentError if an output would replace
    what is read, see `check_outputs`.
    """
    inputs: list[Input] = []
    logs: list[str] = []
    outputs: dict[str, tuple[str | Path, str]] = {}
    piped: Path | None = None
    stdout = sys.stdout
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for values, name, mark in [*_marked(command, bound.arguments)]:
            given = values[name]
            paths = given if isinstance(given, list) else [given]
            if isinstance(mark, Writes):
                if name == "out" and paths == [STANDARD]:
                    piped = folder / f"output.{mark.piped}"
                    STANDARD_FILES[str(piped)] = "standard output"
                    paths = [str(piped)]
                    # a table goes there, and messages for people to stderr
                    stack.enter_context(redirect_stdout(sys.stderr))
                target: str | Path = paths[0]
                if mark.kind == "export":
                    from trajkit.export.files import path_of

                    target = path_of(bound.arguments["to"], Path(target))
                outputs[f"--{name}"] = target, mark.kind
            else:
                if mark.kind != "tokenizer" and STANDARD in paths:
                    own = _spooled(folder, paths)
                    paths = [own if one == STANDARD else one for one in paths]
                # an import fetches its own, because it takes other files of a directory
                if mark.kind != "records":
                    paths = [*map(str, stack.enter_context(local_files(paths)))]
                # a missing file is an error; of tokenizers, their reader says more
                if mark.kind not in ("records", "tokenizer"):
                    paths_of(paths)
                files = inputs_of(paths, None, mark.suffixes)
                if mark.kind in ("turns", "sessions"):
                    files = turns_inputs(paths)
                logs += [str(file.path) for file in files if mark.kind == "turns"]
                inputs += files
            values[name] = paths if isinstance(given, list) else paths[0]
        given = [bound.arguments.get("no_clobber")]
        given += [getattr(one, "no_clobber", False) for one in bound.arguments.values()]
        check_outputs(outputs, inputs, clobber=not any(given))
        try:
            code = command(*bound.args, **bound.kwargs)
        except tk.TrajkitError as error:
            # of several logs, the one that the error names
            named = [log for log in logs if log in str(error)] or logs
            found = map(advised, filter(os.path.isfile, named))
            advice = next(filter(None, found), "")
            if isinstance(error, ArgumentError) or not advice:
                raise
            raise type(error)(f"{error}. {advice}") from None
        if piped is not None:
            stdout.flush()
            with piped.open("rb") as content:
                shutil.copyfileobj(content, stdout.buffer)
    return code or 0


def _marked(
    command: Any, values: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Files among a function's parameters, or an object's attributes."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        value = values.get(name)
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Reads | Writes) and value is not None:
                yield values, name, mark
        if is_dataclass(value):
            yield from _marked(type(value), vars(value))


def _spooled(folder: Path, paths: list[str]) -> str:
    """Standard input as a file; its first bytes determine the suffix."""
    if paths.count(STANDARD) > 1 or any(folder.glob("input*")):
        raise ArgumentError("standard input is given twice: only one file may be -")
    path = folder / "input"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    STANDARD_FILES[str(path)] = "standard input"
    with path.open("rb") as file:
        kind = "jsonl" if not path.stat().st_size else format_of(file)
    named = str(path.rename(folder / f"input.{kind}"))
    STANDARD_FILES[named] = "standard input"
    return named


# --- policies: --policy NAME --set CHOICE=VALUE, and the list of them

_HINTS = {k: hint for k, hint in get_type_hints(tk.Policy).items() if k != "name"}
_HELP = (
    f"one of {', '.join([*PRESETS, *ALIASES])}; --set CHOICE=VALUE changes a choice of the "
    "policy before it (`trajkit policies NAME` lists them), and --fork-threshold K is "
    "short for --set fork_threshold=K"
)


def _texts(_: object, tokens: Sequence[Token]) -> list[str]:
    """The options as texts for `policy_of`: a policy, and the choices after it.

    A fork threshold alone is for every preset that uses it.
    """
    texts: list[str] = []
    for token in tokens:
        choice = "fork_threshold=" * (token.keyword == "--fork-threshold") + token.value
        if token.keyword == "--policy":
            texts.append(choice)
        elif texts:
            texts[-1] += f" {choice}"
        elif token.keyword == "--set":
            raise ArgumentError(f"--set {choice} needs a --policy before it")
        else:
            for name, one in PRESETS.items():
                uses = one.merge_rewrites or one.absorbs_short
                texts.append(f"{name} {choice}" if uses else name)
    return texts


_OPTIONS = Parameter(
    name=("--policy", "--set", "--fork-threshold"),
    converter=_texts,
    negative=(),
    allow_leading_hyphen=False,
    help=f"{_HELP} (default: faithful)",
)
_MANY = f"{_HELP}. May be repeated (default: all policies)"
_MAYBE = f"{_HELP} (default: rows of any policy)"
PolicyOption = Annotated[list[str] | None, _OPTIONS]
MaybePolicyOption = Annotated[list[str] | None, _OPTIONS, Parameter(help=_MAYBE)]
PoliciesOption = Annotated[list[str] | None, _OPTIONS, Parameter(help=_MANY)]


def policy_of(text: str) -> tk.Policy:
    """The policy of ``"NAME CHOICE=VALUE ..."``."""
    name, *sets = text.split() or [""]
    choices: dict[str, object] = {"name": name}
    for one in sets:
        choice, equals, value = one.partition("=")
        if not (choice and equals):
            raise ArgumentError(f"--set {one!r}: expected CHOICE=VALUE")
        if choice in choices:
            raise ArgumentError(f"policy {name!r}, {one}: {choice} is given twice")
        choices[choice] = _value(choice, value)
    return tk.policy(**choices)  # type: ignore[arg-type]


def _value(choice: str, text: str) -> object:
    if get_origin(_HINTS.get(choice)) is tuple:
        return tuple(filter(None, text.split(",")))
    if text in NAMED_CHOICES.get(choice, ()):
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text, text)


def one_policy(texts: list[str] | None) -> tk.Policy:
    """The only policy of the options, faithful by default."""
    first, *others = texts or ["faithful"]
    if others:
        raise ArgumentError(f"{len(others) + 1} policies: name the one with --policy")
    return policy_of(first)


def policies(
    policy: Annotated[str | None, Parameter(help="a policy")] = None,
    /,
    *,
    json: Json = False,
) -> None:
    """List the policies, or the choices of one.

    Policies are listed with the choices that differ from the defaults. With a POLICY, list
    all its choices, their values, what --set accepts, and what the policy does.
    """
    if policy is not None:
        one = tk.policy(policy)
        print_result([asdict(one)], _choices(one), json)
        return
    default = _written(tk.Policy(name="", parent_by="messages"))
    del default["parent_by"]
    lines = []
    for name, one in (PRESETS | ALIASES).items():
        changed = (f"{k}={v}" for k, v in _written(one).items() if default.get(k) != v)
        lines.append([name, ", ".join(changed)])
    otherwise = ", ".join(f"{name}={value}" for name, value in default.items())
    text = f"{text_table(['policy', 'choices'], lines)}\n\notherwise: {otherwise}"
    print_result([*map(asdict, PRESETS.values())], text, json)


def _choices(policy: tk.Policy) -> str:
    """Every choice of one policy, its value, and what it may be; and its rules in words."""
    values, lines = _written(policy), []
    kinds: dict[Any, str] = {bool: "true, false", int: "an integer"}
    kinds[int | None] = "an integer, none"
    for name, hint in _HINTS.items():
        named = NAMED_CHOICES.get(name, ["names, separated by commas"])
        lines.append([name, values[name], kinds.get(hint, ", ".join(named))])
    rules = [f"{name}={values[name]}: {rule_of(policy, name)}" for name in RULES]
    return "\n".join([text_table([policy.name, "is", "may be"], lines), "", *rules])


def _written(policy: tk.Policy) -> dict[str, str]:
    """Every choice of a policy and its value as ``--set`` accepts it."""
    values = {name: getattr(policy, name) for name in _HINTS}
    return {
        name: ",".join(one) if isinstance(one, tuple) else str(one).lower()
        for name, one in values.items()
    }
