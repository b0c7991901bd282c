"""Rules of turns and rows that need more than their columns: payloads, images, bodies.

The rules of columns are in `trajkit.schema`, beside them.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from trajkit.errors import SchemaError
from trajkit.schema.columns import Fault, Rows
from trajkit.schema.engine import (
    MAX_LOGPROB,
    POSITIVE,
    broken,
    broken_items,
    fault,
    nulls,
    owners,
)
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import is_list, list_parts
from trajkit.tables.ragged import lengths
from trajkit.tables.take import list_values
from trajkit.turns.images import has_items, image_faults
from trajkit.turns.messages import parse_json
from trajkit.turns.sessions import run_starts


def payloads(table: pa.Table) -> Iterator[Fault]:
    """The rules of `trajkit.schema.PAYLOADS` that do not depend on other turns."""
    for name in ("ref_logprobs", "teacher_logprobs"):
        for start, ends, values in _payload(table, name, pa.types.is_floating):
            numbers = values.cast(pa.float64()).fill_null(0.0).to_numpy()
            rule = f"{name}[{{}}] is {{}}: "
            bad = ~np.isfinite(numbers)
            yield broken_items(start, ends, bad, rule + "it is not a number", numbers)
            bad = numbers > MAX_LOGPROB
            yield broken_items(start, ends, bad, rule + POSITIVE, numbers)
    if "sampling_mask_start" not in table.column_names:
        yield from _sampling_mask(table)


def _sampling_mask(table: pa.Table) -> Iterator[Fault]:
    """Each output id is among those that it was drawn from."""
    outputs = list_values(table.column("output_ids")).to_numpy()
    n_ids = lengths(table.column("output_ids"))
    begins = np.append(0, np.cumsum(n_ids))
    for start, ends, values in _payload(table, "sampling_mask", is_list):
        n_here = np.diff(ends, prepend=0)
        own = n_ids[start : start + len(ends)]
        given = ~nulls(table.column("sampling_mask").slice(start, len(ends)))
        odd = np.zeros(len(table), np.bool_)
        odd[start : start + len(ends)] = given & (n_here != own)
        n_masks = np.zeros(len(table), np.int64)
        n_masks[start : start + len(ends)] = n_here
        rule = "{} elements of sampling_mask for {} output_ids"
        yield broken(odd, rule, n_masks, n_ids)
        if odd.any():
            return
        row, index = owners(np.arange(len(values)), ends)
        sampled = outputs[begins[start + row] + index]
        inner, ids = list_parts(values)
        sizes = np.diff(inner.to_numpy())
        holder = np.repeat(np.arange(len(values)), sizes)
        same = ids.to_numpy(zero_copy_only=False) == sampled[holder]
        held = np.bincount(holder, same, len(values)) > 0
        yield broken_items(
            start,
            ends,
            (sizes > 0) & ~held,
            "sampling_mask[{}] lacks the sampled id {}: it belongs to another token",
            sampled,
        )


def _payload(
    table: pa.Table, name: str, fits: Callable[[pa.DataType], bool]
) -> Iterator[tuple[int, Rows, pa.Array]]:
    """As `flat_chunks`, for an extra column that may be absent."""
    if name not in table.column_names:
        return
    column = table.column(name)
    if pa.types.is_null(column.type):
        return
    if not is_list(column.type) or not fits(column.type.value_type):
        what = "lists of ids" if fits is is_list else "numbers"
        raise SchemaError(f"column {name!r} is {column.type}: expected lists of {what}")
    start = 0
    for chunk in column.chunks:
        offsets, values = list_parts(chunk)
        yield start, offsets.to_numpy()[1:], values
        start += len(chunk)


def mm_items(table: pa.Table) -> Iterator[Fault]:
    """Images are in the prompt or row, in order; their tokens are their content ids."""
    if not has_items(table):
        return
    of_rows = "row_index" in table.column_names
    name, first = "input_ids" if of_rows else "prompt_ids", np.zeros(len(table))
    if name not in table.column_names:
        name, first = "suffix_ids", table.column("shared_length").to_numpy()
    faults: dict[int, str] = {}
    for row, listed in enumerate(table.column("mm_items").to_pylist()):
        if listed:
            ids = table.column(name)[row].values.to_numpy()
            found = image_faults(listed, ids, int(first[row]), may_be_cut=of_rows)
            for _, words in found:
                faults.setdefault(row, words)
    yield fault(np.array([*faults], np.int64), "{}", list(faults.values()))


def bodies(name: str, table: pa.Table) -> Iterator[Fault]:
    """Each key has a JSON body, in its first message of the session, and of one message."""
    places, rows = message_places(table, name)
    keys, roles, texts = (
        pc.struct_field(places, field) for field in ("key", "role", "body")
    )
    sessions = np.searchsorted(run_starts(table), rows, side="right")
    codes = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
    names = sessions * (len(codes) + 1) + codes
    first = np.unique(names, return_index=True)[1]
    absent = np.asarray(texts.is_null())
    missing = np.sort(first[absent[first]])
    yield fault(
        rows[missing],
        "the message with the key {} has no body, here or earlier in the session (rows "
        "filtered out? then validate with bodies=False)",
        [keys[int(at)].as_py().hex() for at in missing],
    )
    given = np.flatnonzero(~absent)
    said = texts.dictionary_encode().indices.fill_null(0).to_numpy()[given]
    _, before, group = np.unique(names[given], return_index=True, return_inverse=True)
    other = given[said != said[before[group]]]
    first_of = dict(zip(given.tolist(), before[group].tolist(), strict=True))
    other = np.array(
        [
            at
            for at in other.tolist()
            if not _is_same(texts[at].as_py(), texts[int(given[first_of[at]])].as_py())
        ],
        np.int64,
    )
    yield fault(
        rows[other],
        "the message with the key {} has another body earlier in the session: "
        "compute its key with trajkit.turns.message_key",
        [keys[int(at)].as_py().hex() for at in other],
    )
    faults = {
        int(at): words
        for at in given
        if (words := _body_fault(texts[at].as_py(), roles[at].as_py())) is not None
    }
    yield fault(rows[list(faults)], "{}", list(faults.values()))


def _is_same(body: str, other: str) -> bool:
    """Whether two bodies are of messages that are ``==``."""
    try:
        return bool(parse_json(body) == parse_json(other))
    except ValueError:
        return False


def _body_fault(body: str, role: str) -> str | None:
    shown = body if len(body) <= 60 else f"{body[:57]}..."
    try:
        message = parse_json(body)
    except ValueError as error:
        return f"the message body {shown!r} is not JSON: {error}"
    if not isinstance(message, dict):
        return f"the message body {shown!r} is not a JSON object"
    if message.get("role") != role:
        return f"the message body {shown!r} states another role than {role!r}"
    return None


def message_places(table: pa.Table, name: str) -> tuple[pa.StructArray, Rows]:
    """Every message of a table in session order, prompt before reply, with its row."""
    listed = table.column(name)
    replies = table.column("response").combine_chunks()
    flat = pa.chunked_array([chunk.flatten() for chunk in listed.chunks], replies.type)
    there = np.flatnonzero(replies.is_valid().to_numpy(zero_copy_only=False))
    rows = np.repeat(np.arange(len(listed)), lengths(listed))
    places = pa.concat_arrays([*flat.chunks, replies.take(pa.array(there))])
    both = np.concatenate([rows, there])
    order = np.argsort(both, kind="stable")
    return places.take(pa.array(order)), both[order]
