"""``trajkit check``: what a trainer's rows train, compared with what was sampled."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.tokenizer import Codec
from trajkit.cli.drift import marked
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    Count,
    Json,
    NoClobber,
    PolicyOption,
    Reading,
    Rows,
    TokenizerPath,
    Turns,
    maybe_policy,
    nothing,
    print_json,
)
from trajkit.cli.screen import Screen, text_table, visible, working
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.files.tables import read_any_rows, write_table
from trajkit.verification.row_forms import plain_rows

WRONG = 1
RIGHT = ("trains", "session_without_rows")
"""Lines that are no finding."""

_MOST_LINES = 3


def check(
    rows: Rows,
    turns: Turns,
    /,
    *,
    out: Annotated[str | None, OUT, Writes("row_checks")] = None,
    policy: PolicyOption = None,
    show: Count = 3,
    tokenizer: TokenizerPath = None,
    reading: Reading | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> int:
    """Say whether a trainer's mask trains what was sampled.

    Find rows of any trainer in the log by their tokens, and say which turn each row trains,
    which trained tokens nobody sampled, which sampled tokens no row trains, and whether
    mask or logprobs are shifted. The exit code is 1 if anything is wrong. docs/check.md
    lists the columns that are understood. With --policy, tokens that the policy does not
    train are not missing; without it, every sampled token that may be trained is expected
    in a row.

    Parameters
    ----------
    rows
        Rows: Parquet, Arrow IPC or JSON by suffix, .npz, .pt, or a directory.
    turns
        The recorded calls that they come from, in files or directories.
    out
        Write all lines as a table.
    show
        Wrong rows to print.
    """
    chosen = maybe_policy(policy)
    loaded = chosen_tokenizer(tokenizer, turns)
    table = plain_rows(any_rows(rows))
    if not table.num_rows:
        raise nothing(rows, "rows")
    calls = (reading or Reading()).turns(turns)
    with working("comparing rows with the log"):
        found = tk.check_rows(table, calls, chosen)
    if out is not None:
        write_table(found, out)
    lines = found.to_pylist()
    wrong = [line for line in lines if line["kind"] not in RIGHT]
    if json:
        print_json({"wrong": bool(wrong), "lines": lines})
    else:
        codec = None if loaded is None else Codec(loaded)
        Screen(colour=False).print(describe(table, calls, lines, codec, show))
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
