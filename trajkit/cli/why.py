"""``trajkit why`` and ``trajkit tree``: sessions explained in the terminal."""

import argparse
import sys

import pyarrow as pa

import trajkit as tk
from trajkit._arrow import lazy_compute as pc
from trajkit.cli.options import Commands, add_policy, chosen_policy
from trajkit.errors import UnknownSessionError


def add_why(commands: Commands) -> None:
    """Add ``why`` to the command line."""
    parser = commands.add_parser(
        "why",
        help="explain why each row begins where it does",
        description="Print a sentence for each row that a policy makes: the turn that "
        "opens it, where and why that turn leaves the path of its parent, and the tokens "
        "that the row trains and loses.",
    )
    _add_turns(parser)
    add_policy(parser)
    parser.set_defaults(run=run_why)


def add_tree(commands: Commands) -> None:
    """Add ``tree`` to the command line."""
    parser = commands.add_parser(
        "tree",
        help="draw the calls of each session as a tree",
        description="Print the calls of each session: which call each continues under a "
        "policy, its label if it opens a branch, and where its prompt drifts.",
    )
    _add_turns(parser)
    add_policy(parser)
    parser.set_defaults(run=run_tree)


def _add_turns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="TURNS",
        help="turns: Parquet, Arrow IPC or JSONL by suffix, or a directory of them",
    )
    parser.add_argument(
        "--session", metavar="ID", help="a single session (default: all of them)"
    )


def run_why(arguments: argparse.Namespace) -> int:
    """Print the sentences; the exit code is 0."""
    turns = _turns(arguments)
    reasons = tk.analysis.why(turns, chosen_policy(arguments))
    session = None
    for line in reasons.select(["session_id", "sentence"]).to_pylist():
        if line["session_id"] != session:
            session = line["session_id"]
            sys.stdout.write(f"session {_printable(session)}\n")
        sys.stdout.write(f"  {line['sentence']}\n")
    return 0


def run_tree(arguments: argparse.Namespace) -> int:
    """Print the trees; the exit code is 0."""
    turns = _turns(arguments)
    policy = chosen_policy(arguments)
    for session in pc.unique(turns["session_id"]).to_pylist():
        sys.stdout.write(f"session {_printable(session)}\n")
        for line in tk.analysis.call_tree(turns, session, policy):
            sys.stdout.write(f"  {line}\n")
    return 0


def _turns(arguments: argparse.Namespace) -> pa.Table:
    turns = tk.read_turns(arguments.source)
    if arguments.session is None:
        return turns
    found = turns.filter(pc.equal(turns["session_id"], arguments.session))
    if not found.num_rows:
        raise UnknownSessionError(f"the turns have no session {arguments.session!r}")
    return found


def _printable(text: str) -> str:
    """The text without characters that move the cursor or change the direction."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
