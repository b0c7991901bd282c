"""``trajkit verify``: check rows against their turns."""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import trajkit as tk
from trajkit.cli.file_options import job_options, rejected_note
from trajkit.cli.options import (
    add_facts,
    chosen_policy,
    command,
    known_sessions,
)
from trajkit.cli.progress import Progress
from trajkit.cli.text import text_table
from trajkit.io.tables import iter_tables
from trajkit.verification.files import verify_file

VIOLATED = 1
SHOWN = 20
_NO_POLICY = (
    "without --policy, only what is true under every policy is checked: trained tokens "
    "were sampled, and have the engine's logprobs. --policy compares with the policy's rows"
)


@command(
    "verify",
    """
check rows against the turns that they come from

Check rows against the turns that they come from, and print the violations. The exit code is
1 if there are any. Rows of other systems need input_ids and loss_mask.

rows ROWS        rows, in a file or a directory
turns TURNS...   their turns, in files or directories
--session-prefix, --nonfinite-logprobs, --json
-o --out OUT  write the table of violations; DIRECTORY/ gets parts, where an interrupted
                 run continues
--policy NAME    compare with the rows of this policy (default: check what is true under
                 every policy)
--set, --fork-threshold, --weigh-by, --max-row-tokens, --gather, --rejected
""",
    extend=add_facts,
    writes="violations",
)
def run(arguments: argparse.Namespace) -> int:
    """Print the violations; the exit code is 1 if there are any."""
    policy = None
    if arguments.policy is not None:
        policy = chosen_policy(arguments)
    elif arguments.set or arguments.fork_threshold is not None:
        raise tk.errors.ArgumentError("--set and --fork-threshold need --policy")
    with tempfile.TemporaryDirectory(prefix="trajkit-verify-") as folder:
        output = arguments.out or str(Path(folder, "violations.arrows"))
        with Progress("verify", "turns") as bar:
            totals = verify_file(
                arguments.rows,
                arguments.turns,
                output,
                policy,
                reward=arguments.reward,
                sessions=known_sessions(arguments.sessions),
                max_row_tokens=arguments.max_row_tokens,
                weigh_by=arguments.weigh_by,
                **job_options(arguments, bar),
            )
        if arguments.json:
            _print_json(iter_tables(output), totals)
        else:
            text = describe(iter_tables(output))
            note = "" if policy is not None else f"{_NO_POLICY}\n"
            sys.stdout.write(f"{text}\n{note}{rejected_note(arguments, totals)}")
    return VIOLATED if totals["violations"] else 0


def _print_json(found: Iterable[pa.Table], totals: dict[str, int]) -> None:
    """One object, written piece by piece: there may be many violations."""
    sys.stdout.write('{"violations": [')
    between = ""
    for table in found:
        for one in table.to_pylist():
            sys.stdout.write(between + json.dumps(one))
            between = ", "
    rejected = totals.get("rejected")
    rest = "" if rejected is None else f', "rejected": {rejected}'
    sys.stdout.write(f"]{rest}}}\n")


def describe(found: Iterable[pa.Table]) -> str:
    """The first violations, and the number of violations of each rule."""
    counts: Counter[str] = Counter()
    first: list[dict[str, Any]] = []
    for table in found:
        counts.update(table["rule"].cast(pa.string()).to_pylist())
        first += table.slice(0, SHOWN - len(first)).to_pylist()
    if not counts:
        return "no violations"
    head = ["session", "row", "turn", "token", "rule", "detail"]
    names = ["session_id", "row_index", "turn_index", "token", "rule", "detail"]
    lines = [["" if one[n] is None else str(one[n]) for n in names] for one in first]
    left = counts.total() - len(lines)
    more = f"and {left:,} more\n" if left else ""
    rules = text_table(["rule", "violations"], [*counts.items()])
    return f"{text_table(head, lines)}\n{more}\n{rules}"
