"""Options and messages of the commands that go from file to file."""

import argparse
import json
import sys
from collections.abc import Mapping

from trajkit.cli.progress import Progress
from trajkit.jobs.group_sessions import SessionIndex, bucket_numbers
from trajkit.jobs.stages import JobOptions, Stage, Target, Watch, run_job


def job_options(arguments: argparse.Namespace, bar: Progress) -> JobOptions:
    """What ``--gather`` and ``--rejected`` ask for, with the progress bar."""
    gather = arguments.gather == "auto"

    def note(text: str) -> None:
        sys.stderr.write(f"trajkit: {text}\n")

    def begins(index: SessionIndex, done: int) -> None:
        if (
            gather
            and index.scattered is not None
            and len({*bucket_numbers(index).values()}) > 1
        ):
            note(
                f"session {index.scattered!r} is not contiguous: all turns are grouped "
                "through temporary files first"
            )
        bar.begin(index.n_turns, done)

    return JobOptions(
        rejected=arguments.rejected,
        gather=gather,
        watch=Watch(begins, bar.advance, note),
    )


def run_stage(
    arguments: argparse.Namespace,
    stage: Stage,
    targets: Mapping[str, Target],
    bar: Progress,
) -> Mapping[str, int]:
    """Apply a stage to the turns of ``arguments.source``; returns the totals."""
    return run_job(arguments.source, stage, targets, **job_options(arguments, bar))


def rejected_count(totals: Mapping[str, int]) -> dict[str, int]:
    """The number of rejected sessions for JSON, if ``--rejected`` was given."""
    return {name: totals[name] for name in ("rejected",) if name in totals}


def rejected_note(arguments: argparse.Namespace, totals: Mapping[str, int]) -> str:
    """A line with the number of rejected sessions, if ``--rejected`` was given."""
    if arguments.rejected is None:
        return ""
    return f"{totals['rejected']:,} sessions rejected, see {arguments.rejected}\n"


def print_written(
    arguments: argparse.Namespace,
    totals: Mapping[str, int],
    facts: Mapping[str, object],
    text: str,
) -> None:
    """Print what a command wrote: one JSON object with ``facts``, or ``text``."""
    if arguments.json:
        text = json.dumps({"output": arguments.output, **facts})
    else:
        note = rejected_note(arguments, totals)
        text = f"{text}\n\n{note}written to {arguments.output}"
    sys.stdout.write(text + "\n")
