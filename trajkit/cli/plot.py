"""``trajkit plot``: pictures of a run."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import trajkit as tk
from trajkit.cli.file_options import write_text
from trajkit.cli.options import (
    add_policies,
    chosen_policies,
    command,
    known_sessions,
    read_turns,
)
from trajkit.errors import ArgumentError
from trajkit.io.formats import replacing

_FIGURES = ("svg", "png", "pdf")

KINDS: Mapping[str, tuple[str, Sequence[str]]] = {
    "forest": (
        "the calls of a session, their drift, and what policies train",
        ("svg",),
    ),
    "tokens": ("each turn of a session: prompt by role, output by fate", _FIGURES),
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
        "the policy (default: faithful). forest: may be repeated (default: all)",
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
    if policies and len(policies) > 1 and kind != "forest":
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
        case _:
            figure = tk.plot.swimlanes(turns, sessions)
    from trajkit.plot.figures import save

    with replacing(path) as draft:
        save(figure, draft, suffix)
