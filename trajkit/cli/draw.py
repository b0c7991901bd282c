"""``trajkit draw``: a picture of one session."""

import argparse
from pathlib import Path

import trajkit as tk
from trajkit.analysis.session_svg import draw_session
from trajkit.cli.options import Commands


def add_draw(commands: Commands) -> None:
    """Add ``draw`` to the command line."""
    parser = commands.add_parser(
        "draw",
        help="draw a session as an SVG picture",
        description="Draw the calls of one session: where each leaves the call that it "
        "continues, where its prompt drifts, and what each policy trains.",
    )
    parser.add_argument(
        "source",
        metavar="TURNS",
        help="turns: Parquet, Arrow IPC or JSONL by suffix, or a directory of them",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the SVG file"
    )
    parser.add_argument(
        "--session",
        metavar="ID",
        help="the session to draw (default: the one with the most turns)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the picture; the exit code is 0."""
    picture = draw_session(tk.read_turns(arguments.source), arguments.session)
    arguments.output.write_text(picture, encoding="utf-8")
    return 0
