"""``trajkit plot`` and ``trajkit report``: pictures and a page of a run."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

import trajkit as tk
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.cli.options import (
    Commands,
    add_policies,
    add_policy,
    checked_policy,
    chosen_policy,
)
from trajkit.cli.tokenizer import load_tokenizer
from trajkit.errors import ArgumentError
from trajkit.io.tables import sessions_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURES = ("svg", "png", "pdf")

KINDS: Mapping[str, tuple[str, Sequence[str]]] = {
    "forest": (
        "the calls of a session, their drift, and what policies train",
        ("svg",),
    ),
    "tokens": ("each turn of a session: prompt by role, output by fate", _FIGURES),
    "drift": ("turns that drift, by cause and region", _FIGURES),
    "policies": ("what each policy trains, loses and costs", _FIGURES),
    "run": ("distributions, and averages over training steps", _FIGURES),
    "swimlanes": ("generation, tools and queue of each session over time", _FIGURES),
    "trace": ("the same as a Chrome trace, for ui.perfetto.dev", ("json",)),
}
"""Each kind of picture: what it shows, and the suffixes that it is written as."""


def add_plot(commands: Commands) -> None:
    """Add ``plot`` to the command line."""
    kinds = "\n".join(
        f"  {name:10} {shows} ({', '.join(suffixes)})"
        for name, (shows, suffixes) in KINDS.items()
    )
    parser = commands.add_parser(
        "plot",
        help="draw a run or a session",
        description="Draw a run or a session. All kinds but forest and trace need "
        "matplotlib (pip install 'trajkit[plot]').",
        epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "kind", metavar="KIND", choices=KINDS, help="what to draw (see below)"
    )
    _add_run(parser, "FILE", "the picture; its suffix is the format")
    parser.add_argument(
        "--session",
        metavar="ID",
        help="forest, tokens: the session (default: the one with the most turns)",
    )
    add_policies(
        parser,
        "the policy (default: faithful). forest, policies: may be repeated (default: "
        "all)",
    )
    parser.set_defaults(run=run_plot)


def add_report(commands: Commands) -> None:
    """Add ``report`` to the command line."""
    parser = commands.add_parser(
        "report",
        help="describe a run on one HTML page",
        description="Write one HTML page, without scripts: what was recorded, what each "
        "policy keeps and costs, drift by cause and what to change, rewards, groups, "
        "lengths, weight versions, and violations of the rows.",
    )
    _add_run(parser, "FILE.html", "the page")
    parser.add_argument(
        "--rows",
        metavar="ROWS",
        help="rows to verify, of any system (default: those of the policy)",
    )
    add_policy(parser)
    parser.set_defaults(run=run_report)


def _add_run(parser: argparse.ArgumentParser, file: str, what: str) -> None:
    parser.add_argument(
        "source",
        metavar="RUN",
        help="turns: Parquet, Arrow IPC or JSONL by suffix, or the directory of a run; - "
        "is standard input",
    )
    parser.add_argument(
        "-o", dest="picture", metavar=file, type=Path, required=True, help=what
    )
    parser.add_argument(
        "--sessions",
        metavar="FILE",
        help="a line per session: session_id, reward, group_id, error (default: the "
        "sessions in the directory of the run, if there are any)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="drift, report: the model's tokenizer.json, or its directory",
    )


def run_plot(arguments: argparse.Namespace) -> int:
    """Write the picture; the exit code is 0."""
    kind, path = arguments.kind, arguments.picture
    suffixes = KINDS[kind][1]
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in suffixes:
        raise ArgumentError(
            f"-o {path}: {kind} is written as {' or '.join(f'.{one}' for one in suffixes)}"
        )
    policies = [checked_policy(*one) for one in arguments.policy or ()]
    if len(policies) > 1 and kind not in ("forest", "policies"):
        raise ArgumentError(
            f"--policy is given {len(policies)} times: {kind} takes one"
        )
    turns, sessions = tk.read_turns(arguments.source), _sessions(arguments)
    if kind in ("forest", "trace"):
        if kind == "trace":
            text = tk.plot.trace(turns, sessions)
        else:
            text = tk.plot.forest(turns, arguments.session, policies=policies or None)
        path.write_text(text, encoding="utf-8")
        return 0
    policy = policies[0] if policies else tk.policy("faithful")

    def drift() -> "Figure":
        tokenizer = _tokenizer(arguments)
        links = tk.link(turns, policy)
        return tk.plot.drift(tk.classify_drift(turns, links, tokenizer=tokenizer))

    def run() -> "Figure":
        _, report = tk.linearize(turns, policy, sessions=sessions, report=True)
        return tk.plot.run(turns, report, policy)

    draw: dict[str, Callable[[], Figure]] = {
        "tokens": lambda: tk.plot.tokens(turns, policy, arguments.session),
        "drift": drift,
        "policies": lambda: tk.plot.policies(
            tk.simulate(turns, policies or None, sessions=sessions)
        ),
        "run": run,
        "swimlanes": lambda: tk.plot.swimlanes(turns, sessions),
    }
    figure = draw[kind]()
    from trajkit.plot.figures import save

    save(figure, path, suffix)
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write the page; the exit code is 0."""
    page = tk.plot.report(
        tk.read_turns(arguments.source),
        chosen_policy(arguments),
        sessions=_sessions(arguments),
        rows=None if arguments.rows is None else tk.read_rows(arguments.rows),
        tokenizer=_tokenizer(arguments),
    )
    arguments.picture.write_text(page, encoding="utf-8")
    return 0


def _sessions(arguments: argparse.Namespace) -> pa.Table | None:
    """The table of ``--sessions``, else that of the run's directory."""
    if arguments.sessions is None:
        return sessions_below(arguments.source)
    return tk.read_sessions(arguments.sessions)


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    return None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
