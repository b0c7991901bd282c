"""What several commands have: types of parameters, readers of logs, and printing.

A command's signature gives the types and defaults of its options, its numpydoc docstring
their help. An option of several commands is here with its help.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from json import dumps
from typing import Annotated, Any, Literal

import pyarrow as pa
from cyclopts import Parameter
from cyclopts.validators import Number

import trajkit as tk
from trajkit.cli import say, shown
from trajkit.cli.files import Reads, Writes
from trajkit.cli.screen import Progress
from trajkit.errors import ArgumentError, InvalidTurnsError, LeftOutWarning
from trajkit.files.group import Log, SessionIndex
from trajkit.files.run import Stage, Watch, run
from trajkit.files.sources import Paths, SessionPrefix
from trajkit.files.tables import sessions_below
from trajkit.tables.take import take_session
from trajkit.turns.validation import reject_turns


def _out(help: str | None = None) -> Parameter:
    return Parameter(name=("--out", "-o"), allow_leading_hyphen=True, help=help)


OUT = _out()
FILE = _out("Parquet, Arrow IPC or JSONL, by suffix; - is standard output")
PARTS = _out(
    "Parquet, Arrow IPC or JSONL, by suffix; - is standard output; DIRECTORY/ gets parts, "
    "where an interrupted run continues"
)
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
    Reads("tokenizer"),
]
Session = Annotated[
    str | None, Parameter(help="a single session (default: all of them)")
]
MaxRowTokens = Annotated[
    Count | None, Parameter(help="rows are truncated after this many tokens")
]


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

    def pieces(self, source: Paths, *, empty: bool = False) -> Iterator[pa.Table]:
        """`turns` in tables of complete sessions. With ``empty``, there may be no call."""
        log = Log(
            *(source, None, self.nonfinite_logprobs),
            reject=True,
            session_prefix=self.session_prefix,
        )
        index = log.index()
        if not index.n_turns and not empty:
            raise no_calls(source)
        n_good, rejected = 0, list[dict[str, str]]()
        with Progress("read", "turns") as bar:
            bar.begin(index.n_turns)
            for piece in log.pieces(index):
                good, bad = reject_turns(
                    piece.turns, self.nonfinite_logprobs, bodies=True
                )
                rejected += [*piece.rejected.to_pylist(), *bad.to_pylist()]
                n_good += good.num_rows
                bar.advance(piece.n_turns)
                yield good
        for k, one in enumerate(rejected):
            reason = InvalidTurnsError(one["reason"])
            if k < _PLACED:
                reason = log.placed(reason)
            if not n_good:
                raise reason
            words = f"session {one['session_id']!r} is left out: {reason}"
            warnings.warn(words, LeftOutWarning, stacklevel=2)


READING = Reading()
# rejected sessions whose file and line are searched for
_PLACED = 10


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

    @contextmanager
    def options(self, name: str, source: Paths) -> Iterator[dict[str, Any]]:
        """The options of `trajkit.run`, with a progress bar."""

        def begins(index: SessionIndex, done: int) -> None:
            if not index.n_turns:
                raise no_calls(source)
            bar.begin(index.n_turns, done)

        with Progress(name, "turns") as bar:
            yield dict(
                rejected=self.rejected,
                nonfinite_logprobs=self.nonfinite_logprobs,
                session_prefix=self.session_prefix,
                watch=Watch(begins, bar.advance, say),
            )

    def run(
        self,
        name: str,
        source: Paths,
        stage: Stage,
        outputs: str | Mapping[str, str],
        resume: Mapping[str, object] | None = None,
        *,
        dedup: bool = False,
    ) -> dict[str, int]:
        """Apply a stage to the turns; returns the totals."""
        with self.options(name, source) as options:
            return run(source, stage, outputs, resume=resume, dedup=dedup, **options)

    def print(
        self, totals: Mapping[str, int], facts: Mapping[str, Any], text: str
    ) -> None:
        """Print facts as JSON, or the text, and the number of rejected sessions."""
        if "rejected" in totals:
            facts = {**facts, "rejected": totals["rejected"]}
            number = f"{totals['rejected']:,} sessions rejected, see {self.rejected}"
            text = f"{number}\n{text}"
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


def no_calls(source: Paths) -> InvalidTurnsError:
    """The error of an input without a call; a torn line gives its warning first."""
    with suppress(tk.TrajkitError):
        tk.read_turns(source)
    return nothing(source, "calls")


def read_rows(path: str) -> pa.Table:
    """The rows of a file or directory; no row at all is an error."""
    rows = tk.read_rows(path)
    if not rows.num_rows:
        raise nothing(path, "rows")
    return rows


def nothing(source: Paths, what: str) -> InvalidTurnsError:
    """The error of an input without a line."""
    names = ", ".join(map(str, source if isinstance(source, list) else [source]))
    return InvalidTurnsError(f"{names}: no {what}, nothing to do")
