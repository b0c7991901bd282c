"""Rows as trainers have them: which of their columns are ids, mask and logprobs.

A row is given as complete ids, or as a prompt and a response, with or without padding. A
mask that is shorter than the row is that of the row's end.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import arrow_source
from trajkit.errors import SchemaError
from trajkit.schema.engine import Bools
from trajkit.tables.canonical import as_table, canonical_rows
from trajkit.verification.rules import count

Array = npt.NDArray[Any]

# By column of the ids: the columns that a row needs. slime: tokens; OpenRLHF: sequences;
# verl: prompts, responses; verl's agent loop: prompt_ids, response_ids; TRL: prompt_ids,
# completion_ids.
WHOLE = ("input_ids", "tokens", "sequences")
PARTS = (
    ("prompts", "responses"),
    ("prompt_ids", "response_ids"),
    ("prompt_ids", "completion_ids"),
)
MASKS = ("loss_mask", "response_mask", "action_mask", "assistant_masks")
# TRL: completion_mask says which tokens of a completion exist, env_mask and tool_mask which
# of them the model sampled
_COMPLETION, _SAMPLED = "completion_mask", ("env_mask", "tool_mask")
LOGPROBS = (
    *("logprobs", "rollout_log_probs", "response_logprobs", "sampling_logprobs"),
    *("sampling_per_token_logps", "inference_logprobs", "output_logprobs"),
)
_COLUMNS = {
    *(*WHOLE, *MASKS, *LOGPROBS, *_SAMPLED, *(name for part in PARTS for name in part)),
    *(_COMPLETION, "prompt_mask", "attention_mask", "labels", "response_length"),
    *("row_index", "spans", "suffix_mask"),
}
NOT_TRAINED = -100
"""The label of a token that is not trained."""

PLAIN = pa.schema(
    [
        pa.field("session_id", pa.string()),
        pa.field("row_index", pa.int32()),
        pa.field("input_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.large_list(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.large_list(pa.float32())),
        # tokens of padding that were left out before the row
        pa.field("padding", pa.int32(), nullable=False),
    ]
)
"""Rows of any trainer: mask and logprobs have the length of the ids."""


def is_rows(names: list[str]) -> bool:
    if "output_ids" in names:
        return False
    whole = any(name in names for name in (*WHOLE, "suffix_mask"))
    return whole or any({*part} <= {*names} for part in PARTS)


def plain_rows(given: object) -> pa.Table:
    """Rows of any trainer as `PLAIN`.

    Parameters
    ----------
    given : table, dict of columns, list of dicts or of objects
        Rows of trajkit, or of a trainer. Columns are lists, or tensors of
        shape (n_rows, n_tokens) with an ``attention_mask``.

    Raises
    ------
    SchemaError
        No column has ids, or no column has a mask; lengths do not fit together.
    """
    table = _table(given)
    if {"spans", "suffix_mask"} & {*table.column_names}:
        tokens = ["input_ids", "loss_mask", "logprobs"]
        table = canonical_rows(table).select(["session_id", "row_index", *tokens])
    found = [_plain(row, number) for number, row in enumerate(_rows(table))]
    return pa.Table.from_pylist(found, PLAIN)


def _table(given: Any) -> pa.Table:
    if hasattr(given, "batch") and hasattr(given, "non_tensor_batch"):
        given = given.batch  # of verl's DataProto
    if hasattr(given, "to_dict") and hasattr(given, "batch_size"):  # a TensorDict
        given = given.to_dict()
    if isinstance(given, list | tuple):
        if not given:
            raise SchemaError("rows is an empty list: expected a row or more")
        given = [*map(_fields, given)]
        if not _COLUMNS & {*given[0]}:
            return pa.Table.from_pylist(given)
        wanted = {*_COLUMNS, "session_id"}
        given = [{n: v for n, v in one.items() if n in wanted} for one in given]
    if isinstance(given, Mapping):
        given = {n: v for n, v in given.items() if getattr(v, "ndim", 2) != 0}
    if arrow_source(given) is None:
        raise SchemaError(
            f"rows of type {type(given).__name__}: expected a table, a dict of columns, or "
            "a list of dicts"
        )
    return as_table(given)


def _fields(one: Any) -> dict[str, Any]:
    if isinstance(one, Mapping):
        return dict(one)
    if is_dataclass(one) and not isinstance(one, type):
        return asdict(one)
    if not hasattr(one, "__dict__"):
        raise SchemaError(
            f"rows: a list with a {type(one).__name__}: expected dicts, or objects with "
            "the fields of a row"
        )
    return dict(vars(one))


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows, with lists of numbers as arrays, without nulls."""
    number = itertools.count()
    of_tokens = {*WHOLE, *MASKS, *LOGPROBS, *(name for part in PARTS for name in part)}
    for batch in table.to_batches():
        for k in range(batch.num_rows):
            row, at = {}, next(number)
            for name in batch.schema.names:
                value = batch.column(name)[k]
                values: Any = getattr(value, "values", None)
                if value.is_valid and not isinstance(values, pa.Array):
                    row[name] = value.as_py()
                elif value.is_valid and not pa.types.is_nested(values.type):
                    if pa.types.is_null(values.type):
                        values = values.cast(pa.int64())
                    if pa.types.is_floating(values.type):
                        values = values.fill_null(float("nan"))
                    row[name] = values.to_numpy(zero_copy_only=False)
                elif value.is_valid and name in of_tokens:
                    raise SchemaError(
                        f"row {at}: {name} has lists: expected the numbers of one row; "
                        "write one row per sequence"
                    )
            yield row


def _plain(row: dict[str, Any], number: int) -> dict[str, Any]:
    where = f"row {number} has the columns {', '.join(row)}"
    whole = [row[name] for name in WHOLE if name in row]
    parts = [[row[name] for name in part] for part in PARTS if {*part} <= {*row}]
    if not whole and not parts:
        raise SchemaError(
            f"{where}: expected ids, as input_ids (or tokens, sequences), or as prompts "
            "and responses (or prompt_ids and completion_ids or response_ids)"
        )
    ids = whole[0] if whole else np.concatenate(parts[0])
    n = len(ids)

    def aligned(name: str, fill: float = 0) -> Array:
        """Values of the end of the row, as many as it has tokens."""
        values = row[name]
        if len(values) > n:
            raise SchemaError(
                f"row {number}: {name} has {len(values)} values for {count(n)}"
            )
        before = np.full(n - len(values), fill, np.result_type(values, type(fill)))
        return np.concatenate([before, values])

    exists = np.ones(n, np.bool_)
    if "attention_mask" in row:
        exists = aligned("attention_mask") != 0
    elif parts and "prompt_mask" in row:
        n_prompt = len(parts[0][0])
        exists[:n_prompt] = row["prompt_mask"] != 0
        if _COMPLETION in row:
            exists[n_prompt:] = row[_COMPLETION] != 0
    mask = _mask(row, ids, number, aligned)
    if mask is None:
        raise SchemaError(
            f"{where}: expected a mask, one of {', '.join((*MASKS, _COMPLETION, 'labels'))}"
        )
    kept = np.flatnonzero(exists)
    padding = int(kept[0]) if len(kept) else 0
    at = slice(padding, int(kept[-1]) + 1 if len(kept) else 0)
    logprobs = None
    for name in [name for name in LOGPROBS if name in row][:1]:
        own = aligned(name, float("nan"))[at].astype(np.float32)
        logprobs = pa.array(own, pa.float32(), mask=np.isnan(own))
    session = row.get("session_id")
    return {
        "session_id": None if session is None else str(session),
        "row_index": row.get("row_index", number),
        "input_ids": ids[at].astype(np.int32),
        "loss_mask": (mask & exists)[at],
        "logprobs": logprobs,
        "padding": padding,
    }


def _flags(name: str, values: Array, number: int) -> Bools:
    odd = values[(values != 0) & (values != 1)]
    if len(odd):
        raise SchemaError(
            f"row {number}: {name} has {odd[0]:g}: expected 0 and 1. If these are weights, "
            "pass which of them train: 1 where the weight is not 0"
        )
    return values.astype(np.bool_)


def _mask(
    row: dict[str, Any], ids: Array, number: int, aligned: Callable[..., Array]
) -> Bools | None:
    mask: Bools
    for name in MASKS:
        if name in row:
            return _flags(name, aligned(name), number)
    if names := [name for name in (_COMPLETION, *_SAMPLED) if name in row]:
        flags = [_flags(name, aligned(name), number) for name in names]
        mask = np.all(flags, axis=0)
        return mask
    if "labels" in row:
        labels = aligned("labels", NOT_TRAINED)
        mask = labels != NOT_TRAINED
        at = np.flatnonzero(mask)
        if (labels[at] == ids[at]).all():
            return mask
        if at[-1] < len(ids) - 1 and (labels[at] == ids[at + 1]).all():
            return np.append(False, mask[:-1])  # they are those of the next token
        bad = int(at[np.flatnonzero(labels[at] != ids[at])[0]])
        raise SchemaError(
            f"row {number}: labels[{bad}] is {labels[bad]}, which is neither the token "
            "there nor the next one"
        )
    if "response_length" in row:  # slime: a loss_mask of None trains the response
        mask = np.arange(len(ids)) >= len(ids) - int(row["response_length"])
        return mask
    return None
