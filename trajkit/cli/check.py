"""``trajkit check``: what a trainer's rows train, compared with what was sampled."""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.tokenizer import Codec
from trajkit.cli.drift import marked
from trajkit.cli.options import chosen_policy, command, nothing, read_turns
from trajkit.cli.terminal import Screen, visible
from trajkit.cli.text import text_table
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.io.tables import read_any_rows, write_table
from trajkit.verification.row_forms import plain_rows

WRONG = 1
RIGHT = ("trains", "session_without_rows")
"""Lines that are no finding."""

_MOST_LINES = 3


@command(
    "check",
    """
say whether a trainer's mask trains what was sampled

Find rows of any trainer in the log by their tokens, and say which turn each row trains,
which trained tokens nobody sampled, which sampled tokens no row trains, and whether mask or
logprobs are shifted. The exit code is 1 if anything is wrong. docs/check.md lists the
columns that are understood.

rows ROWS         rows: Parquet, Arrow IPC or JSON by suffix, .npz, .pt, or a directory
turns TURNS...    the recorded calls that they come from, in files or directories
--json
-o --out FILE     write all lines as a table
--show K 3        wrong rows to print (default: %(default)s)
--tokenizer
--policy NAME     tokens that this policy does not train are not missing (default: every
                  sampled token that may be trained is expected in a row)
--set, --fork-threshold, --session-prefix, --nonfinite-logprobs
""",
    writes="row_checks",
)
def run(arguments: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 if there are any."""
    policy = None
    if arguments.policy is not None:
        policy = chosen_policy(arguments)
    elif arguments.set or arguments.fork_threshold is not None:
        raise tk.errors.ArgumentError("--set and --fork-threshold need --policy")
    arguments.source = arguments.turns
    tokenizer = chosen_tokenizer(arguments)
    rows = plain_rows(any_rows(arguments.rows))
    if not rows.num_rows:
        raise nothing(arguments.rows, "rows")
    turns = read_turns(arguments)
    found = tk.check_rows(rows, turns, policy)
    if arguments.out is not None:
        write_table(found, arguments.out)
    lines = found.to_pylist()
    wrong = [line for line in lines if line["kind"] not in RIGHT]
    if arguments.json:
        sys.stdout.write(json.dumps({"wrong": bool(wrong), "lines": lines}) + "\n")
    else:
        codec = None if tokenizer is None else Codec(tokenizer)
        text = describe(rows, turns, lines, codec, arguments.show)
        Screen.of_stdout(colour=False).print(text)
    return WRONG if wrong else 0


def any_rows(path: str) -> object:
    """The rows of a file, as its format has them."""
    name = path.lower()
    if name.endswith(".npz"):
        with np.load(path) as arrays:
            return dict(arrays)
    if name.endswith((".pt", ".pkl", ".pickle")):
        from trajkit.importers.pickles import load

        value: Any = load(Path(path))
        return value.get("samples", value) if isinstance(value, dict) else value
    return read_any_rows(path)


def describe(
    rows: pa.Table,
    turns: pa.Table,
    lines: list[dict[str, Any]],
    codec: Codec | None,
    most: int,
) -> str:
    """The findings in words: the first wrong rows, then the number of each kind."""
    n_trained = sum(map(sum, rows["loss_mask"].to_pylist()))
    n_sampled = sum(map(len, turns["output_ids"]))
    text = [
        f"rows {rows.num_rows:,}, tokens trained {n_trained:,}; "
        f"turns {turns.num_rows:,}, tokens sampled {n_sampled:,}"
    ]
    by_row: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_row[line["row"]].append(line)
    bad = {
        row: [one for one in own if one["kind"] not in RIGHT]
        for row, own in by_row.items()
    }
    wrong = [row for row, own in bad.items() if own and row is not None]
    shown = wrong[:most] or [row for row in by_row if row is not None][:most]
    for row in shown:
        text.append(_row(row, by_row[row]))
        first = bad[row][:_MOST_LINES]
        text += [f"  {_finding(one, rows, codec)}" for one in first]
        if len(bad[row]) > _MOST_LINES:
            text.append(
                f"  and {len(bad[row]) - _MOST_LINES} more, in the table of --out"
            )
    for one in by_row[None][:_MOST_LINES]:
        session = one["session_id"]
        where = "no row" if session is None else f"session {session}"
        text.append(f"{where}: {one['detail']}")
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for own in bad.values():
        for one in own:
            kinds[one["kind"]].append(one)
    if not kinds:
        return "\n".join(
            [*text, "right: every trained token was sampled, and trains once"]
        )
    head = ("wrong", "rows", "tokens")
    counts = [
        (
            kind.replace("_", " "),
            len({one["row"] for one in own} - {None}),
            sum(one["tokens"] for one in own),
        )
        for kind, own in kinds.items()
    ]
    return "\n".join([*text, "", text_table(head, counts)])


def _row(row: int, lines: list[dict[str, Any]]) -> str:
    """What a row trains of which turns."""
    session = next((one["session_id"] for one in lines if one["session_id"]), None)
    where = "" if session is None else f" (session {visible(session)})"
    trained = [one["detail"] for one in lines if one["kind"] == "trains"]
    pairs = [one.removeprefix("trains ").partition(", if ") for one in trained]
    words = "; ".join(first for first, _, _ in pairs[:_MOST_LINES])
    if len(trained) > _MOST_LINES:
        words += f"; and of {len(trained) - _MOST_LINES} more turns"
    condition = next((f", if {rest}" for _, _, rest in pairs if rest), "")
    return f"row {row}{where}: trains {words or 'nothing that was sampled'}{condition}"


def _finding(line: dict[str, Any], rows: pa.Table, codec: Codec | None) -> str:
    """A finding, with the text around its first token."""
    if line["token"] is None:
        return str(line["detail"])
    text = f"{line['detail']} (from token {line['token']})"
    if codec is None:
        return text
    k = line["row"]
    ids = np.asarray(rows["input_ids"][k].values)
    start = line["token"] - rows["padding"][k].as_py()
    return f"{text}  {marked(codec, ids, start, start + min(line['tokens'], 8))}"
