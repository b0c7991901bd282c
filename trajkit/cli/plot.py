"""``trajkit plot`` and ``trajkit report``: pictures and a page of a run."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import trajkit as tk
from trajkit.cli.file_options import page_path, write_text
from trajkit.cli.options import (
    add_policies,
    chosen_policies,
    chosen_policy,
    command,
    known_sessions,
    read_turns,
)
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.errors import ArgumentError
from trajkit.io.formats import replacing

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


_USAGE = """
source RUN...    turns: Parquet, Arrow IPC or JSON by suffix, or the directory of a run; -
                 is standard input
--session-prefix, --nonfinite-logprobs
--sessions FILE  a line per session: session_id, reward, group_id, error (default: the
                 sessions in the directory of the run, if there are any)
"""


def _add_to_plot(parser: argparse.ArgumentParser) -> None:
    kinds = "\n".join(
        f"  {name:10} {shows} ({', '.join(suffixes)})"
        for name, (shows, suffixes) in KINDS.items()
    )
    parser.epilog = f"kinds:\n{kinds}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_policies(
        parser,
        "the policy (default: faithful). forest, policies: may be repeated (default: all)",
    )


@command(
    "plot",
    f"""
draw a run or a session

Draw a run or a session. All kinds but forest and trace need matplotlib (pip install
'trajkit[plot]').

kind KIND         what to draw (see below)
{_USAGE.strip()}
-o --out FILE     the picture; its suffix is the format
--session ID      forest, tokens: the session (default: the one with the most turns)
--tokenizer PATH  drift: the model's tokenizer.json, or its directory
""",
    extend=_add_to_plot,
    kind={"choices": KINDS},
    writes="picture",
    out={"type": Path, "required": True},
)
def run_plot(arguments: argparse.Namespace) -> None:
    """Write the picture."""
    kind, path = arguments.kind, arguments.out
    suffixes = KINDS[kind][1]
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in suffixes:
        raise ArgumentError(
            f"-o {path}: {kind} is written as {' or '.join(f'.{one}' for one in suffixes)}"
        )
    policies = chosen_policies(arguments)
    if policies and len(policies) > 1 and kind not in ("forest", "policies"):
        raise ArgumentError(
            f"--policy is given {len(policies)} times: {kind} takes one"
        )
    turns, sessions = (
        read_turns(arguments),
        known_sessions(arguments.sessions, arguments.source, arguments.session_prefix),
    )
    policy = policies[0] if policies else tk.policy("faithful")
    session = arguments.session
    match kind:
        case "forest":
            text = tk.plot.forest(turns, session, policies=policies)
            write_text(path, text)
            return
        case "trace":
            write_text(path, tk.plot.trace(turns, sessions))
            return
        case "tokens":
            figure = tk.plot.tokens(turns, policy, session)
        case "drift":
            tokenizer, links = chosen_tokenizer(arguments), tk.link(turns, policy)
            figure = tk.plot.drift(tk.classify_drift(turns, links, tokenizer=tokenizer))
        case "policies":
            counts = tk.simulate(turns, policies, sessions=sessions)
            figure = tk.plot.policies(counts)
        case "run":
            _, report = tk.linearize(turns, policy, sessions=sessions, report=True)
            figure = tk.plot.run(turns, report, policy)
        case _:
            figure = tk.plot.swimlanes(turns, sessions)
    from trajkit.plot.figures import save

    with replacing(path) as draft:
        save(figure, draft, suffix)


@command(
    "report",
    f"""
describe a run on one HTML page

Write one HTML page, without scripts: what was recorded, what each policy keeps and costs,
drift by cause and what to change, rewards, groups, lengths, weight versions, and violations
of the rows.
{_USAGE}
-o --out FILE.html  the page
--tokenizer
--rows ROWS   rows to verify, of any system (default: those of the policy)
--policy, --set, --fork-threshold
""",
    writes="picture",
    out={"type": Path, "required": True},
)
def run_report(arguments: argparse.Namespace) -> None:
    """Write the page."""
    path = page_path(arguments.out)
    page = tk.plot.report(
        read_turns(arguments),
        chosen_policy(arguments),
        sessions=known_sessions(
            arguments.sessions, arguments.source, arguments.session_prefix
        ),
        rows=None if arguments.rows is None else tk.read_rows(arguments.rows),
        tokenizer=chosen_tokenizer(arguments),
    )
    write_text(path, page)
