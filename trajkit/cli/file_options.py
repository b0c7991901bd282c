"""What the commands that go from file to file share."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from trajkit.cli.progress import Progress
from trajkit.io.tables import write_tables
from trajkit.jobs.group_sessions import Log, buckets
from trajkit.jobs.session_index import SessionIndex
from trajkit.jobs.stages import Stage, Target, Watch, run


class Through(TypedDict):
    """How a command reads its turns, as the functions of `trajkit.jobs.stages` take it."""

    rejected: str | None
    gather: bool
    watch: Watch


def add_through(parser: argparse.ArgumentParser) -> None:
    """Add ``--gather`` and ``--rejected``."""
    parser.add_argument(
        "--gather",
        choices=("auto", "no"),
        default="auto",
        help="sessions that lie scattered: gather them through temporary files (beside "
        "OUT, where there is one), or refuse them (default: %(default)s)",
    )
    parser.add_argument(
        "--rejected",
        metavar="FILE",
        help="leave out sessions that break a rule, and write here which and why "
        "(default: the first one is an error)",
    )


def through(arguments: argparse.Namespace, bar: Progress) -> Through:
    """What the options say."""
    gather = arguments.gather == "auto"

    def begins(census: SessionIndex, done: int) -> None:
        if (
            gather
            and census.scattered is not None
            and len({*buckets(census).values()}) > 1
        ):
            sys.stderr.write(
                f"trajkit: session {census.scattered!r} does not lie in one piece: all "
                "turns are gathered through temporary files first\n"
            )
        bar.begin(census.n_turns, done)

    def says(text: str) -> None:
        sys.stderr.write(f"trajkit: {text}\n")

    return Through(
        rejected=arguments.rejected,
        gather=gather,
        watch=Watch(begins, bar.advance, says),
    )


def look_through(
    arguments: argparse.Namespace,
    stage: Stage,
    targets: Mapping[str, Target],
    bar: Progress,
) -> Mapping[str, int]:
    """Put the turns of ``arguments.source`` through a stage that adds them up."""
    how = through(arguments, bar)
    aside = how["rejected"]
    if aside is not None:
        targets = {**targets, "rejected": Target(Path(aside), write_tables)}
    log = Log(arguments.source, aside=aside is not None, gather=how["gather"])
    return run(log, stage, targets, None, how["watch"])


def aside_count(totals: Mapping[str, int]) -> dict[str, int]:
    """How many sessions were set aside, if that was asked for, as JSON says it."""
    return {name: totals[name] for name in ("rejected",) if name in totals}


def written(arguments: argparse.Namespace, totals: Mapping[str, int]) -> str:
    """Where the output is, and what was left out, for people."""
    return f"{rejected_note(arguments, totals)}written to {arguments.output}"


def rejected_note(arguments: argparse.Namespace, totals: Mapping[str, int]) -> str:
    """A line that says how many sessions were set aside, if that was asked for."""
    if arguments.rejected is None:
        return ""
    return f"{totals['rejected']:,} sessions rejected, see {arguments.rejected}\n"
