"""``trajkit verify``: whether rows keep what they promise about their turns."""

import argparse
import json
import sys

import pyarrow as pa

import trajkit as tk
from trajkit.cli.options import (
    Commands,
    add_facts,
    add_set,
    add_weigh_by,
    checked_policy,
    count,
    known_sessions,
)
from trajkit.cli.show import text_table
from trajkit.io import read_any_rows, write_table

VIOLATED = 1
SHOWN = 20


def add_verify(commands: Commands) -> None:
    """Add ``verify`` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="check rows against the turns that they were made of",
        description="Check every promise of rows against the turns that they were made "
        "of, and print what is violated. The exit code is 1 where something is. Rows "
        "of other systems need input_ids and loss_mask.",
    )
    parser.add_argument("rows", metavar="ROWS", help="rows, in a file or a directory")
    parser.add_argument(
        "turns", metavar="TURNS", help="their turns, in a file or a directory"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the table of violations"
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="whose promise is to hold (default: every token trained once)",
    )
    add_set(parser)
    add_facts(parser, reward=True)
    add_weigh_by(parser)
    parser.add_argument(
        "--max-row-tokens", metavar="N", type=count, help="rows were cut after N tokens"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the violations; the exit code is 1 where there are any."""
    policy = None
    if arguments.policy is not None:
        policy = checked_policy(arguments.policy, arguments.set)
    elif arguments.set:
        raise tk.PolicyError("--set needs --policy")
    found = tk.verify(
        read_any_rows(arguments.rows),
        tk.read_turns(arguments.turns),
        policy,
        reward=arguments.reward,
        sessions=known_sessions(arguments),
        max_row_tokens=arguments.max_row_tokens,
        weigh_by=arguments.weigh_by,
    )
    if arguments.output is not None:
        write_table(found, arguments.output)
    if arguments.json:
        text = json.dumps({"violations": found.to_pylist()})
    else:
        text = describe(found)
    sys.stdout.write(text + "\n")
    return VIOLATED if found.num_rows else 0


def describe(found: pa.Table) -> str:
    """The first violations, and how many there are of each rule."""
    if found.num_rows == 0:
        return "no violations"
    counts = found["rule"].cast(pa.string()).value_counts().to_pylist()
    lines = [
        [
            *(
                "" if one[name] is None else str(one[name])
                for name in ("session_id", "row_index", "turn_index", "token", "rule")
            ),
            one["detail"],
        ]
        for one in found.slice(0, SHOWN).to_pylist()
    ]
    head = ["session", "row", "turn", "token", "rule", "detail"]
    left = found.num_rows - len(lines)
    return "\n".join(
        [
            text_table(head, lines),
            *([f"and {left:,} more"] if left else []),
            "",
            text_table(
                ["rule", "violations"], [[c["values"], c["counts"]] for c in counts]
            ),
        ]
    )
