"""``trajkit check`` and ``trajkit verify``: rows compared with the turns they come from."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.tokenizer import Codec
from trajkit.cli import BAD_DATA, DONE
from trajkit.cli import options as opt
from trajkit.cli.files import Writes
from trajkit.cli.policies import PolicyOption, maybe_policy
from trajkit.cli.screen import Progress, text_table, visible
from trajkit.cli.show import marked
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.files.tables import iter_tables, read_any_rows, write_table
from trajkit.learn.weights import By
from trajkit.verification.files import verify_file
from trajkit.verification.row_forms import plain_rows

RIGHT = ("trains", "session_without_rows")
"""Lines that are no finding."""

_MOST_LINES, _MOST_VIOLATIONS = 3, 20
_NO_POLICY = (
    "without --policy, only what is true under every policy is checked: trained tokens "
    "were sampled, and have the engine's logprobs. --policy compares with the policy's rows"
)


def check(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.OUT, Writes("row_checks")] = None,
    policy: PolicyOption = None,
    show: opt.Count = 3,
    tokenizer: opt.TokenizerPath = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
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
        raise opt.nothing(rows, "rows")
    calls = reading.turns(turns)
    with Progress("comparing rows with the log"):
        found = tk.check_rows(table, calls, chosen)
    if out is not None:
        write_table(found, out)
    lines = found.to_pylist()
    wrong = any(line["kind"] not in RIGHT for line in lines)
    trained = sum(map(sum, table["loss_mask"].to_pylist()))
    sampled = sum(map(len, calls["output_ids"]))
    text = (
        f"rows {table.num_rows:,}, tokens trained {trained:,}; "
        f"turns {calls.num_rows:,}, tokens sampled {sampled:,}\n"
        + describe(table, lines, None if loaded is None else Codec(loaded), show)
    )
    opt.print_result({"wrong": wrong, "lines": lines}, text, json)
    return BAD_DATA if wrong else DONE


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
    rows: pa.Table, lines: list[dict[str, Any]], codec: Codec | None, most: int
) -> str:
    """The findings in words: the first wrong rows, then the number of each kind."""
    wrong = [line for line in lines if line["kind"] not in RIGHT]
    text = []
    for row in [*dict.fromkeys(one["row"] for one in wrong or lines)][:most]:
        if row is not None:
            bad = [_finding(one, rows, codec) for one in wrong if one["row"] == row]
            text += [_row(row, [line for line in lines if line["row"] == row])]
            text += [f"  {one}" for one in bad[:_MOST_LINES]]
            if len(bad) > _MOST_LINES:
                text.append(
                    f"  and {len(bad) - _MOST_LINES} more, in the table of --out"
                )
    for one in [line for line in lines if line["row"] is None][:_MOST_LINES]:
        session = one["session_id"]
        where = "no row" if session is None else f"session {visible(session)}"
        text.append(f"{where}: {one['detail']}")
    if not wrong:
        return "\n".join(
            [*text, "right: every trained token was sampled, and trains once"]
        )
    counts = (
        pl.DataFrame(wrong, infer_schema_length=None)
        .group_by(pl.col("kind").str.replace_all("_", " "), maintain_order=True)
        .agg(pl.col("row").drop_nulls().n_unique(), pl.col("tokens").sum())
    )
    table = text_table(("wrong", "rows", "tokens"), counts.rows())
    return "\n".join([*text, "", table])


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
    start = line["token"] - rows["padding"][line["row"]].as_py()
    ids = np.asarray(rows["input_ids"][line["row"]].values)
    return f"{text}  {marked(codec, ids, start, start + min(line['tokens'], 8))}"


def verify(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.OUT, Writes("violations")] = None,
    policy: PolicyOption = None,
    sessions: opt.SessionsFile = None,
    reward: opt.Reward = None,
    weigh_by: By = "token",
    max_row_tokens: opt.MaxRowTokens = None,
    job: opt.Job = opt.JOB,
) -> int:
    """Check rows against the turns that they come from.

    Print the violations; the exit code is 1 if there are any. Rows of other systems need
    input_ids and loss_mask. With --policy, the rows are compared with those of the policy;
    without it, what is true under every policy is checked.

    Parameters
    ----------
    turns
        Their turns, in files or directories.
    out
        Write the table of violations; DIRECTORY/ gets parts, where an interrupted run
        continues.
    weigh_by
        What row_weight is, as for linearize.
    """
    chosen = maybe_policy(policy)
    with tempfile.TemporaryDirectory(prefix="trajkit-verify-") as folder:
        output = out or str(Path(folder, "violations.arrows"))
        with job.options("verify", turns) as options:
            totals = verify_file(
                rows,
                turns,
                output,
                chosen,
                **opt.facts_of(sessions, reward),
                max_row_tokens=max_row_tokens,
                weigh_by=weigh_by,
                **options,
            )
        found = pl.concat(map(pl.DataFrame, iter_tables(output)))
    text = "no violations"
    if len(found):
        names = ("session_id", "row_index", "turn_index", "token", "rule", "detail")
        first = found.head(_MOST_VIOLATIONS).select(names)
        head = ("session", "row", "turn", "token", "rule", "detail")
        shown = text_table(head, first.cast(pl.String).fill_null("").rows())
        more = len(found) - len(first)
        counts = found.group_by(pl.col("rule").cast(pl.String), maintain_order=True)
        rules = text_table(("rule", "violations"), counts.len().rows())
        text = f"{shown}\n{f'and {more:,} more' * (more > 0)}\n{rules}"
    if chosen is None:
        text += f"\n{_NO_POLICY}"
    job.print(totals, {"violations": found.to_dicts()}, text)
    return BAD_DATA if len(found) else DONE
