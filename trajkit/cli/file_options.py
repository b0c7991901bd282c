"""Options and messages of the commands that go from file to file."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trajkit.cli.options import no_calls
from trajkit.cli.progress import Progress
from trajkit.cli.terminal import Screen
from trajkit.errors import ArgumentError
from trajkit.io.formats import replacing
from trajkit.io.group import SessionIndex, bucket_numbers
from trajkit.io.run import Stage, Watch, run


def job_options(arguments: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    """Options of `trajkit.run`: of ``--gather`` and ``--rejected``, and a progress bar."""
    gather = arguments.gather == "auto"

    def note(text: str) -> None:
        sys.stderr.write(f"trajkit: {text}\n")

    def begins(index: SessionIndex, done: int) -> None:
        if not index.n_turns:
            raise no_calls(getattr(arguments, "turns", None) or arguments.source)
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

    return dict(
        rejected=arguments.rejected,
        gather=gather,
        nonfinite_logprobs=arguments.nonfinite_logprobs,
        session_prefix=arguments.session_prefix,
        watch=Watch(begins, bar.advance, note),
    )


def page_path(path: Path) -> Path:
    """The path of an HTML page; ArgumentError if its suffix is that of something else."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"--out {path}: a page is written as .html")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def run_stage(
    arguments: argparse.Namespace,
    stage: Stage,
    outputs: Mapping[str, Path],
    bar: Progress,
) -> dict[str, int]:
    """Apply a stage to the turns of ``arguments.source``; returns the totals."""
    return run(arguments.source, stage, outputs, **job_options(arguments, bar))


def rejected_note(arguments: argparse.Namespace, totals: Mapping[str, int]) -> str:
    """A line with the number of rejected sessions, if ``--rejected`` was given."""
    if arguments.rejected is None:
        return ""
    return f"{totals['rejected']:,} sessions rejected, see {arguments.rejected}\n"


def print_result(
    arguments: argparse.Namespace,
    totals: Mapping[str, int],
    facts: Mapping[str, object],
    text: str,
) -> None:
    """Print one JSON object with ``facts``, or ``text``, and the rejected sessions."""
    if arguments.json:
        rejected = {name: totals[name] for name in ("rejected",) if name in totals}
        text = json.dumps({**facts, **rejected})
    else:
        text = rejected_note(arguments, totals) + text
    Screen.of_stdout(colour=False).print(text)


def print_written(
    arguments: argparse.Namespace,
    totals: Mapping[str, int],
    facts: Mapping[str, object],
    text: str,
) -> None:
    """Print what a command wrote to ``--out``; see `print_result`."""
    if not arguments.json:
        sys.stdout.write(f"{text}\n\n")
    facts = {"output": arguments.out, **facts}
    print_result(arguments, totals, facts, f"written to {arguments.out}")
