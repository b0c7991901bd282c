"""``trajkit check`` and ``trajkit verify``: rows compared with the turns they come from."""

import json as json_lines
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.tokenizer import Codec
from trajkit.cli.drift import marked
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    Count,
    Job,
    Json,
    MaxRowTokens,
    NoClobber,
    Reading,
    Rows,
    SessionsFile,
    TokenizerPath,
    Turns,
    facts_of,
    nothing,
    print_json,
    print_text,
)
from trajkit.cli.policies import PolicyOption, maybe_policy
from trajkit.cli.screen import Progress, Screen, text_table, visible, working
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.files.tables import iter_tables, read_any_rows, write_table
from trajkit.learn.weights import By
from trajkit.verification.files import verify_file
from trajkit.verification.row_forms import plain_rows

WRONG = 1
RIGHT = ("trains", "session_without_rows")
"""Lines that are no finding."""

_MOST_LINES = 3
SHOWN = 20
_NO_POLICY = (
    "without --policy, only what is true under every policy is checked: trained tokens "
    "were sampled, and have the engine's logprobs. --policy compares with the policy's rows"
)


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
    known = [row for row in by_row if row is not None]
    for row in ([row for row in known if bad[row]] or known)[:most]:
        text.append(_row(row, by_row[row]))
        text += [f"  {_finding(one, rows, codec)}" for one in bad[row][:_MOST_LINES]]
        if len(bad[row]) > _MOST_LINES:
            more = len(bad[row]) - _MOST_LINES
            text.append(f"  and {more} more, in the table of --out")
    for one in by_row[None][:_MOST_LINES]:
        session = one["session_id"]
        where = "no row" if session is None else f"session {session}"
        text.append(f"{where}: {one['detail']}")
    wrong = [one for own in bad.values() for one in own]
    if not wrong:
        text.append("right: every trained token was sampled, and trains once")
        return "\n".join(text)
    counts = (
        pl.DataFrame(wrong, infer_schema_length=None)
        .group_by("kind", maintain_order=True)
        .agg(pl.col("row").drop_nulls().n_unique(), pl.col("tokens").sum())
        .with_columns(pl.col("kind").str.replace_all("_", " "))
    )
    return "\n".join(
        [*text, "", text_table(("wrong", "rows", "tokens"), counts.rows())]
    )


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
            text = describe_violations(iter_tables(output))
            note = "" if chosen is not None else f"\n{_NO_POLICY}"
            rejected = job.rejected_note(totals).rstrip("\n")
            print_text(f"{text}{note}" + (f"\n{rejected}" if rejected else ""))
    return WRONG if totals["violations"] else 0


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


def describe_violations(found: Iterable[pa.Table]) -> str:
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
