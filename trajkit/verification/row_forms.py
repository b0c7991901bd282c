"""Rows as trainers have them: which of their columns are ids, mask and logprobs.

A row is given as complete ids, or as a prompt and a response, with or without padding. A
mask that is shorter than the row is that of the row's end.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit._arguments import arrow_source
from trajkit.errors import SchemaError
from trajkit.schema.engine import Bools
from trajkit.tables.canonical import as_table, canonical_rows
from trajkit.tables.ragged import Array
from trajkit.turns.keys import word_of
from trajkit.verification.rules import count

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
_OF_TOKENS = {
    *(*WHOLE, *MASKS, *LOGPROBS, *_SAMPLED, *(name for part in PARTS for name in part)),
    *(_COMPLETION, "prompt_mask", "attention_mask", "labels"),
}
_COLUMNS = _OF_TOKENS | {
    *("response_length", "position_ids", "row_index", "spans", "suffix_mask")
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
        # whether a column says which tokens are padding
        pa.field("padding_known", pa.bool_(), nullable=False),
        # the columns of the mask
        pa.field("mask_of", pa.string(), nullable=False),
        # columns that are named as masks, and that were not read
        pa.field("unread", pa.list_(pa.string()), nullable=False),
    ]
)
"""Rows of any trainer: mask and logprobs have the length of the ids."""

TOKENS = ["session_id", "row_index", "input_ids", "loss_mask", "logprobs"]
"""The columns that rows of trajkit have too."""


def is_rows(names: list[str]) -> bool:
    if "output_ids" in names:
        return False
    whole = any(name in names for name in (*WHOLE, "suffix_mask"))
    return whole or any({*part} <= {*names} for part in PARTS)


def plain_rows(given: object, first: int = 0) -> pa.Table:
    """Rows of any trainer as `PLAIN`.

    Parameters
    ----------
    given : table, dict of columns, list of dicts or of objects
        Rows of trajkit, or of a trainer. Columns are lists, or tensors of
        shape (n_rows, n_tokens) with an ``attention_mask``.
    first : int
        The number of the first row. It is the row_index of a row that has none.

    Raises
    ------
    SchemaError
        No column has ids, or no column has a mask; lengths do not fit together; a value
        is of another type; columns contradict each other; a row has several sequences;
        some rows only have a row_index.
    """
    if isinstance(given, pa.Table) and given.schema.equals(PLAIN):
        return given
    table = _table(given)
    if {"spans", "suffix_mask"} & {*table.column_names}:
        table = canonical_rows(table).select(TOKENS)
    if "row_index" in table.column_names:
        if 0 < table.column("row_index").null_count < table.num_rows:
            raise SchemaError("row_index is null in some rows: expected all or none")
    found = [_plain(row, number) for number, row in _rows(table, first)]
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
        if not _COLUMNS & {*given[0]} or "spans" in given[0]:
            return pa.Table.from_pylist(given)
        given = [
            {
                n: v
                for n, v in one.items()
                if n in {*_COLUMNS, "session_id"} or _unread(n)
            }
            for one in given
        ]
    if isinstance(given, Mapping):
        given = {n: v for n, v in given.items() if getattr(v, "ndim", 2) != 0}
    if arrow_source(given) is None:
        raise SchemaError(
            f"rows of type {type(given).__name__}: expected a table, a dict of columns, or "
            "a list of dicts"
        )
    return as_table(given)


def _unread(name: str) -> bool:
    """Whether a column is named as a mask, and is none of those that are read."""
    return name not in _COLUMNS and bool(re.search("(^|_)masks?(_|$)", word_of(name)))


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


def _rows(table: pa.Table, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows and their numbers, with lists of numbers as arrays, without nulls."""
    number = itertools.count(first)
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
                elif value.is_valid and name in _OF_TOKENS:
                    raise SchemaError(
                        f"row {at}: {name} has lists: expected the numbers of one row; "
                        "write one row per sequence"
                    )
            yield at, row


def _plain(row: dict[str, Any], number: int) -> dict[str, Any]:
    where = f"row {number} has the columns {', '.join(row)}"
    ids, prompt = _ids(row, number, where)
    n = len(ids)

    def aligned(name: str, fill: float = 0) -> Array:
        """Values of the end of the row, as many as it has tokens."""
        values = _numbers(row, name, number)
        if len(values) > n:
            raise SchemaError(
                f"row {number}: {name} has {len(values)} values for {count(n)}"
            )
        before = np.full(n - len(values), fill, np.result_type(values, type(fill)))
        return np.concatenate([before, values])

    exists, known = np.ones(n, np.bool_), "attention_mask" in row
    if known:
        exists = aligned("attention_mask") != 0
    elif prompt is not None and "prompt_mask" in row:
        known = True
        for name, part in (
            ("prompt_mask", slice(prompt)),
            (_COMPLETION, slice(prompt, n)),
        ):
            if name in row:
                values, size = _numbers(row, name, number), len(exists[part])
                if len(values) != size:
                    raise SchemaError(
                        f"row {number}: {name} has {len(values)} values for "
                        f"{count(size)} of its part of the row: expected one for each"
                    )
                exists[part] = values != 0
    _one_sequence(row, number)
    masks = _masks(row, ids, number, aligned)
    if not masks:
        raise SchemaError(
            f"{where}: expected a mask, one of {', '.join((*MASKS, _COMPLETION, 'labels'))}"
        )
    name, mask = next(iter(masks.items()))
    if "attention_mask" in row and (beyond := np.flatnonzero(mask & ~exists)).size:
        raise _contradiction(number, name, "attention_mask", int(beyond[0]))
    kept = np.flatnonzero(exists)
    padding = int(kept[0]) if len(kept) else 0
    at = slice(padding, int(kept[-1]) + 1 if len(kept) else 0)
    logprobs = None
    for column in [name for name in LOGPROBS if np.size(row.get(name, ()))][:1]:
        own = aligned(column, float("nan"))[at].astype(np.float32)
        logprobs = pa.array(own, pa.float32(), mask=np.isnan(own))
    session, index = row.get("session_id"), row.get("row_index", number)
    if type(index) is not int or not 0 <= index < 2**31:
        raise SchemaError(
            f"row {number}: row_index is {_shown(index)}: expected an integer from 0, or "
            "no such column"
        )
    return {
        "session_id": None if session is None else str(session),
        "row_index": index,
        "input_ids": ids[at].astype(np.int32),
        "loss_mask": (mask & exists)[at],
        "logprobs": logprobs,
        "padding": padding,
        "padding_known": known,
        "mask_of": name,
        "unread": [*filter(_unread, row)],
    }


def _shown(value: object) -> str:
    """A value as errors show it, with its end left out if it is long."""
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _numbers(row: dict[str, Any], name: str, number: int) -> Array:
    """The numbers of a column, or SchemaError."""
    values = row[name]
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values
    raise SchemaError(
        f"row {number}: {name} is {_shown(values)}: expected a list of numbers, one for "
        "each token"
    )


def _ids(row: dict[str, Any], number: int, where: str) -> tuple[Array, int | None]:
    """The ids, and the length of the prompt if they are given in two parts."""
    names: list[tuple[str, ...]] = [(name,) for name in WHOLE if name in row]
    names += [part for part in PARTS if {*part} <= {*row}]
    # beside ids, prompts and responses may be texts
    of_ids = [one for one in names if all(_is_ids(row[name]) for name in one)]
    if not names:
        raise SchemaError(
            f"{where}: expected ids, as input_ids (or tokens, sequences), or as prompts "
            "and responses (or prompt_ids and completion_ids or response_ids)"
        )
    if not of_ids or (len(names[0]) == 1 and names[0] != of_ids[0]):
        bad = next(name for name in names[0] if not _is_ids(row[name]))
        raise SchemaError(
            f"row {number}: {bad} is {_shown(row[bad])}: expected the token ids of the "
            "row, a list of integers of 32 bits"
        )
    found = [
        np.concatenate([row[name].astype(np.int32) for name in one]) for one in of_ids
    ]
    for other, one in zip(found[1:], of_ids[1:], strict=True):
        less, more = sorted((found[0], other), key=len)
        # one may be padded
        if len(less) == 0 < len(more) or less.tobytes() not in more.tobytes():
            raise SchemaError(
                f"row {number}: {' and '.join(of_ids[0])} has other ids than "
                f"{' and '.join(one)}: leave out what the trainer does not read"
            )
    first = of_ids[0]
    return found[0], len(row[first[0]]) if len(first) == 2 else None


def _is_ids(values: object) -> bool:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf":
        return False
    whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
    return whole and bool(((values >= -(2**31)) & (values < 2**31)).all())


def _one_sequence(row: dict[str, Any], number: int) -> None:
    """Refuse packed rows, whose positions start again or whose sequences are numbered."""
    words = "the row has several sequences. Split it: expected one sequence per row"
    places = row.get("position_ids")
    if isinstance(places, np.ndarray) and places.dtype.kind in "iuf":
        # padding has equal positions, so a sequence begins with 0 and 1
        begins = np.flatnonzero((places[:-1] == 0) & (places[1:] == 1))
        if len(begins) > 1:
            raise SchemaError(
                f"row {number}: position_ids start again at token {begins[1]}: {words}"
            )
    if "attention_mask" in row:
        values = _numbers(row, "attention_mask", number)
        odd = np.flatnonzero((values != 0) & (values != 1))
        if len(odd):
            at = int(odd[0])
            raise SchemaError(
                f"row {number}: attention_mask[{at}] is {values[at]:g}: expected 0 and 1. "
                f"If it numbers sequences, {words}"
            )


def _contradiction(number: int, name: str, other: str, token: int) -> SchemaError:
    return SchemaError(
        f"row {number}: {name} and {other} contradict each other at token {token}: leave "
        "out the column that the trainer does not read, or correct it"
    )


def _flags(name: str, values: Array, number: int) -> Bools:
    odd = values[(values != 0) & (values != 1)]
    if len(odd):
        raise SchemaError(
            f"row {number}: {name} has {odd[0]:g}: expected 0 and 1. If these are weights, "
            "pass which of them train: 1 where the weight is not 0"
        )
    return values.astype(np.bool_)


def _masks(
    row: dict[str, Any], ids: Array, number: int, aligned: Callable[..., Array]
) -> dict[str, Bools]:
    """The masks of a row by their columns, the one to use first; they agree."""
    found: dict[str, Bools] = {}

    def add(name: str, mask: Bools, differs: Bools | None = None) -> None:
        for first, used in [*found.items()][:1]:
            wrong = np.flatnonzero(used != mask if differs is None else differs)
            if len(wrong):
                raise _contradiction(number, first, name, int(wrong[0]))
        found[name] = mask

    for name in MASKS:
        if name in row:
            add(name, _flags(name, aligned(name), number))
    sampled: Bools
    if names := [name for name in (_COMPLETION, *_SAMPLED) if name in row]:
        flags = [_flags(name, aligned(name), number) for name in names]
        sampled = np.all(flags, axis=0)
        used = next(iter(found.values()), sampled)
        # alone, it says which tokens exist
        alone = names == [_COMPLETION]
        add(" and ".join(names), sampled, used & ~sampled if alone else None)
    # beside a mask, labels may be those of a class, and those of every token
    if "labels" in row and (not found or isinstance(row["labels"], np.ndarray)):
        labels = aligned("labels", NOT_TRAINED)
        if not found or (labels == NOT_TRAINED).any():
            mask, raw = _of_labels(labels, ids, number), labels != NOT_TRAINED
            used = next(iter(found.values()), mask)
            add("labels", mask, np.zeros(1, np.bool_) if (used == raw).all() else None)
    if "response_length" in row:
        _of_response(row, len(ids), number, found)
    return found


def _of_labels(labels: Array, ids: Array, number: int) -> Bools:
    mask: Bools = labels != NOT_TRAINED
    at = np.flatnonzero(mask)
    if (labels[at] == ids[at]).all():
        return mask
    if at[-1] < len(ids) - 1 and (labels[at] == ids[at + 1]).all():
        return np.append(False, mask[:-1])  # they are those of the next token
    bad = int(at[np.flatnonzero(labels[at] != ids[at])[0]])
    raise SchemaError(
        f"row {number}: labels[{bad}] is {labels[bad]}, which is neither the token there "
        "nor the next one"
    )


def _of_response(
    row: dict[str, Any], n: int, number: int, found: dict[str, Bools]
) -> None:
    """slime: a loss_mask of None trains the response, another has its length."""
    length = row["response_length"]
    whole = isinstance(length, int) and not isinstance(length, bool)
    if not found:
        if not whole or not 0 <= length <= n:
            raise SchemaError(
                f"row {number}: response_length is {_shown(length)}: expected the number "
                f"of the row's last tokens that are the response, at most {n}"
            )
        found["response_length"] = np.arange(n) >= n - length
    elif whole and {"attention_mask", "prompts", "responses"}.isdisjoint(row):
        name, mask = next(iter(found.items()))
        before = np.flatnonzero(mask[: max(n - length, 0)])
        size = len(row[name]) if name in MASKS else length
        if size not in (length, n) or len(before):
            raise SchemaError(
                f"row {number}: {name} and response_length contradict each other: {name} "
                f"has {size} values and trains {count(int(mask.sum()))}, and "
                f"response_length is {length}. Correct the one that is wrong"
            )
