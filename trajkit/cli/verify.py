"""``trajkit verify``: check rows against their turns."""

import json as json_lines
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa

from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    Job,
    Json,
    MaxRowTokens,
    NoClobber,
    PolicyOption,
    Rows,
    SessionsFile,
    Turns,
    facts_of,
    maybe_policy,
    print_text,
)
from trajkit.cli.screen import Progress, text_table
from trajkit.files.tables import iter_tables
from trajkit.learn.weights import By
from trajkit.verification.files import verify_file

VIOLATED = 1
SHOWN = 20
_NO_POLICY = (
    "without --policy, only what is true under every policy is checked: trained tokens "
    "were sampled, and have the engine's logprobs. --policy compares with the policy's rows"
)


def verify(
    rows: Rows,
    turns: Turns,
    /,
    *,
    out: Annotated[str | None, OUT, Writes("violations")] = None,
    policy: PolicyOption = None,
    sessions: SessionsFile = None,
    reward: float | None = None,
    weigh_by: By = "token",
    max_row_tokens: MaxRowTokens = None,
    job: Job | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> int:
    """Check rows against the turns that they come from.

    Print the violations; the exit code is 1 if there are any. Rows of other systems need
    input_ids and loss_mask. With --policy, the rows are compared with those of the policy;
    without it, what is true under every policy is checked.

    Parameters
    ----------
    rows
        Rows, in a file or a directory; - is standard input.
    turns
        Their turns, in files or directories.
    out
        Write the table of violations; DIRECTORY/ gets parts, where an interrupted run
        continues.
    reward
        The reward of every session, instead of --sessions.
    weigh_by
        What row_weight is, as for linearize.
    """
    job = job or Job()
    with tempfile.TemporaryDirectory(prefix="trajkit-verify-") as folder:
        output = out or str(Path(folder, "violations.arrows"))
        chosen = maybe_policy(policy)
        with Progress("verify", "turns") as bar:
            totals = verify_file(
                rows,
                turns,
                output,
                chosen,
                **facts_of(sessions, reward),
                max_row_tokens=max_row_tokens,
                weigh_by=weigh_by,
                **job.options(turns, bar),
            )
        if json:
            _print_json(iter_tables(output), totals)
        else:
            text = describe(iter_tables(output))
            note = "" if chosen is not None else f"\n{_NO_POLICY}"
            rejected = job.rejected_note(totals).rstrip("\n")
            print_text(f"{text}{note}" + (f"\n{rejected}" if rejected else ""))
    return VIOLATED if totals["violations"] else 0


def _print_json(found: Iterable[pa.Table], totals: dict[str, int]) -> None:
    """One object, written piece by piece: there may be many violations."""
    sys.stdout.write('{"violations": [')
    between = ""
    for table in found:
        for one in table.to_pylist():
            sys.stdout.write(between + json_lines.dumps(one))
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
