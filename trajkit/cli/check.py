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

# of the first wrong rows, and of each of them, the lines that are shown
_MOST_ROWS, _MOST_LINES, _MOST_VIOLATIONS = 3, 4, 20
_NO_POLICY = (
    "without --policy, only what is true under every policy is checked: trained tokens "
    "were sampled, and have the engine's logprobs. --policy compares with the policy's rows"
)


def check(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.FILE, Writes("row_checks")] = None,
    policy: PolicyOption = None,
    tokenizer: opt.TokenizerPath = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> int:
    """Say whether a trainer's mask trains what was sampled.

    Find rows of any trainer (also .npz and .pt) in the log by their tokens, and say which
    turn each row trains, which trained tokens nobody sampled, which sampled tokens no row
    trains, and whether mask or logprobs are shifted. The exit code is 1 if anything is
    wrong. --out gets all findings. docs/check.md lists the columns that are understood.
    With --policy, tokens that the policy does not train are not missing; without it, every
    sampled token that may be trained is expected in a row.
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
        f"turns {calls.num_rows:,}, tokens sampled {sampled:,}\n\n"
        + describe(table, lines, None if loaded is None else Codec(loaded))
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


def describe(rows: pa.Table, lines: list[dict[str, Any]], codec: Codec | None) -> str:
    """The findings of the first wrong rows, then the number of each kind."""
    wrong = [line for line in lines if line["kind"] not in RIGHT]
    shown = []
    for row in [*dict.fromkeys(one["row"] for one in wrong or lines)][:_MOST_ROWS]:
        own = [line for line in lines if line["row"] == row]
        for one in sorted(own, key=lambda one: one["kind"] in RIGHT)[:_MOST_LINES]:
            words, token = one["detail"], one["token"]
            if codec is not None and token is not None:
                ids = np.asarray(rows["input_ids"][row].values)
                start = token - rows["padding"][row].as_py()
                stop = start + min(one["tokens"], 8)
                words += f"  {marked(codec, ids, start, stop)}"
            places = ["" if one[name] is None else str(one[name]) for name in _PLACES]
            shown.append([*map(visible, places), words])
    found = text_table(("row", "session", "token", "finding"), shown)
    if not wrong:
        return f"{found}\n\nright: every trained token was sampled, and trains once"
    counts = (
        pl.DataFrame(wrong, infer_schema_length=None)
        .group_by(pl.col("kind").str.replace_all("_", " "), maintain_order=True)
        .agg(pl.col("row").drop_nulls().n_unique(), pl.col("tokens").sum())
    )
    return f"{found}\n\n{text_table(('wrong', 'rows', 'tokens'), counts.rows())}"


_PLACES = ("row", "session_id", "token")


def verify(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.PARTS, Writes("violations")] = None,
    policy: PolicyOption = None,
    sessions: opt.SessionsFile = None,
    reward: opt.Reward = None,
    weigh_by: By = "token",
    max_row_tokens: opt.MaxRowTokens = None,
    job: opt.Job = opt.JOB,
) -> int:
    """Check rows against the turns that they come from.

    Print the violations, or write them to --out; the exit code is 1 if there are any. Rows
    of other systems need input_ids and loss_mask. With --policy, the rows are compared with
    those of the policy; without it, what is true under every policy is checked.

    Parameters
    ----------
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
