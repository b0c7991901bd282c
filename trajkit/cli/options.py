"""Types of the commands' parameters, and the parameters that several commands have.

A command is a function: its signature gives the types and defaults of its options, its
numpydoc docstring their help. What several commands take is here with its help, as an
annotated type or as a dataclass whose attributes are options.
"""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pyarrow as pa
from cyclopts import Parameter
from cyclopts.validators import Number

import trajkit as tk
from trajkit.cli.files import Reads, Writes
from trajkit.cli.screen import Progress
from trajkit.errors import ArgumentError, InvalidTurnsError, LeftOutWarning
from trajkit.files.group import Log, SessionIndex, bucket_numbers
from trajkit.files.run import Stage, Watch, run
from trajkit.files.sources import Paths, SessionPrefix
from trajkit.files.tables import sessions_below
from trajkit.turns.validation import reject_turns

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""A number of at least one."""

Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]
"""A port number; 0 is any free one."""

Json = Annotated[bool, Parameter(help="print one JSON object and nothing else")]

Turns = Annotated[
    list[str],
    Parameter(
        help="turns: Parquet, Arrow IPC or JSON by suffix, directories of them, or "
        "patterns; - is standard input"
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

NoClobber = Annotated[bool, Parameter(help="replace no existing file")]

OUT = Parameter(name=("--out", "-o"), allow_leading_hyphen=True)
"""How every command spells its output."""


@Parameter(name="*")
@dataclass(kw_only=True)
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

    def turns(self, source: Paths) -> pa.Table:
        """The turns, without sessions that break a rule.

        Those are reported on stderr. No calls, and no valid session, are errors.
        """
        return pa.concat_tables([*self.pieces(source)], promote_options="default")

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
        n_good = 0
        rejected: list[dict[str, str]] = []
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
            reason = one["reason"]
            if k < _PLACED:
                reason = str(log.placed(InvalidTurnsError(reason)))
            if not n_good:
                raise InvalidTurnsError(reason)
            words = f"session {one['session_id']!r} is left out: {reason}"
            warnings.warn(words, LeftOutWarning, stacklevel=2)


# rejected sessions whose file and line are searched for
_PLACED = 10


@Parameter(name="*")
@dataclass(kw_only=True)
class Job(Reading):
    """How a log of turns is read that may be larger than memory.

    Attributes
    ----------
    gather
        auto: allow a session's calls to be anywhere in the file (they are grouped through
        temporary files, next to OUT if there is one); no: refuse them.
    """

    gather: Literal["auto", "no"] = "auto"
    rejected: Annotated[
        str | None,
        Parameter(
            help="leave out sessions that break a rule, and write them to this file with "
            "the reason (default: the first one is an error)"
        ),
        Writes("rejected"),
    ] = None

    def options(self, source: Paths, bar: Progress) -> dict[str, Any]:
        """The options of `trajkit.run`, with the progress bar."""

        def begins(index: SessionIndex, done: int) -> None:
            if not index.n_turns:
                raise no_calls(source)
            if (
                self.gather == "auto"
                and index.scattered is not None
                and len({*bucket_numbers(index).values()}) > 1
            ):
                note(
                    f"session {index.scattered!r} is not contiguous: all turns are "
                    "grouped through temporary files first"
                )
            bar.begin(index.n_turns, done)

        return dict(
            rejected=self.rejected,
            gather=self.gather == "auto",
            nonfinite_logprobs=self.nonfinite_logprobs,
            session_prefix=self.session_prefix,
            watch=Watch(begins, bar.advance, note),
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
        with Progress(name, "turns") as bar:
            options = self.options(source, bar)
            return run(source, stage, outputs, resume=resume, dedup=dedup, **options)

    def rejected_note(self, totals: Mapping[str, int]) -> str:
        """A line with the number of rejected sessions, if they are written."""
        if self.rejected is None:
            return ""
        return f"{totals['rejected']:,} sessions rejected, see {self.rejected}\n"

    def print(
        self, totals: Mapping[str, int], facts: Mapping[str, Any], text: str, json: bool
    ) -> None:
        """Print ``facts`` as one JSON object, or ``text``, and the rejected sessions."""
        if json:
            rejected = {name: totals[name] for name in ("rejected",) if name in totals}
            print_json({**facts, **rejected})
        else:
            print_text(self.rejected_note(totals) + text)


def note(text: str) -> None:
    """Print a message on stderr."""
    sys.stderr.write(f"trajkit: {text}\n")


def print_text(text: str) -> None:
    """Print text on standard output."""
    sys.stdout.write(f"{text}\n")


def print_json(facts: object) -> None:
    """Print one JSON object."""
    print_text(json.dumps(facts))


def facts_of(
    sessions: str | None, reward: float | None
) -> dict[str, pa.Table | float | None]:
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
