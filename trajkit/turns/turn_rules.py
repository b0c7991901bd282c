"""The rules of a turns table, each as a generator of the rows that break it.

A check takes a table in canonical form that passed the previous checks of its list, and
tests complete columns. It yields texts with column, value and rule, to which
`trajkit.validate` adds session and turn.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import Rows, Violation, is_list, list_parts, violation
from trajkit._arrow.ragged import lengths
from trajkit._arrow.take import list_values
from trajkit.errors import SchemaError
from trajkit.turns.images import has_items, image_faults
from trajkit.turns.messages import parse_json
from trajkit.turns.sessions import run_starts

Check: TypeAlias = Callable[[pa.Table], Iterator[Violation]]
Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_LOGPROB = np.float32(1e-4)
"""Rounding may take a logprob this far above 0."""
NO_LOGPROB = np.float32(-9999.0)
"""vLLM writes this for a token without a logprob; sampled tokens never have it."""


_NO_NUMBER = "it is not a number (nonfinite_logprobs='null' makes it null)"
_NO_LOGPROB = (
    "engines write this if they have no logprob for a token "
    "(nonfinite_logprobs='null' makes it null)"
)
_POSITIVE = "a log-probability is at most 0 (1e-4 is tolerated for rounding)"


def sessions_contiguous(table: pa.Table) -> Iterator[Violation]:
    """The rows of each session are contiguous."""
    names = table.column("session_id").combine_chunks()
    starts = run_starts(table)
    codes = names.take(pa.array(starts)).dictionary_encode().indices.to_numpy()
    # codes count up in order of first appearance
    first = np.unique(codes, return_index=True)[1]
    again = np.flatnonzero(first[codes] != np.arange(len(codes)))
    yield violation(
        starts[again],
        "the session began in table row {} and comes back in row {} after another: "
        "make it contiguous, for instance by sorting the table by session_id",
        starts[first[codes[again]]],
        starts[again],
    )


def broken(
    bad: npt.ArrayLike, template: str, *columns: Sequence[object] | npt.NDArray[Any]
) -> Violation:
    """The rows where ``bad`` is true; a row's value of each column fills the template."""
    rows = np.flatnonzero(bad)
    return rows, lambda k: template.format(
        *(_plain(column, rows[k]) for column in columns)
    )


def broken_items(
    start: int,
    ends: Rows,
    bad: npt.ArrayLike,
    template: str,
    *columns: Sequence[object] | npt.NDArray[Any],
) -> Violation:
    """As `broken`, for the elements of lists, see `flat_chunks`.

    The template first gets the index of the element in its list.
    """
    at = np.flatnonzero(bad)
    rows, index = owners(at, ends)
    return start + rows, lambda k: template.format(
        index[k], *(_plain(column, at[k]) for column in columns)
    )


def _plain(column: Any, at: np.integer[Any]) -> object:
    value = column[int(at)]
    return value.as_py() if isinstance(value, pa.Scalar) else value


def ascending(index: str, table: pa.Table) -> Iterator[Violation]:
    """`index` ascends within each session, from 0 or above."""
    values = table.column(index).to_numpy()
    yield broken(values < 0, f"{index} is negative: it counts from 0")
    before = np.append(-1, values)[: len(values)]
    before[run_starts(table)] = -1
    yield broken(values == before, f"{index} is repeated within the session")
    rule = f"{index} {{}} follows {{}}: it must ascend within a session"
    yield broken(values < before, rule, values, before)


def token_ids(name: str, table: pa.Table) -> Iterator[Violation]:
    """A column of ids has no null and no negative element."""
    yield from no_null(name, table)
    for start, ends, values in flat_chunks(table.column(name)):
        if values.null_count:
            continue
        ids = values.to_numpy()
        if len(ids) and ids.min() < 0:
            rule = f"{name}[{{}}] is {{}}: token ids are not negative"
            yield broken_items(start, ends, ids < 0, rule, ids)


def prompts_not_empty(table: pa.Table) -> Iterator[Violation]:
    """Every prompt has a token."""
    if "prompt_ids" in table.column_names:
        n_prompt = lengths(table.column("prompt_ids"))
    else:
        n_prompt = lengths(table.column("suffix_ids"))
        n_prompt = n_prompt + table.column("shared_length").to_numpy()
    yield broken(
        n_prompt == 0, "prompt_ids is empty: an engine samples after some token"
    )


def logprobs(name: str, ids: str, table: pa.Table) -> Iterator[Violation]:
    """A column has one log-probability per id, or none at all."""
    column = table.column(name)
    n_logprobs, n_ids = lengths(column), lengths(table.column(ids))
    odd = (n_logprobs != n_ids) & ~nulls(column)
    yield broken(odd, f"{{}} {name} for {{}} {ids}", n_logprobs, n_ids)
    for start, ends, values in flat_chunks(column):
        numbers = raw_floats(values)
        given = np.asarray(values.is_valid()) if values.null_count else True
        for wrong, rule in (
            (np.isnan(numbers), _NO_NUMBER),
            (numbers <= NO_LOGPROB, _NO_LOGPROB),
            (numbers > MAX_LOGPROB, _POSITIVE),
        ):
            rule = f"{name}[{{}}] is {{}}: {rule}"
            yield broken_items(start, ends, wrong & given, rule, numbers)


def output_mask(table: pa.Table) -> Iterator[Violation]:
    """One bool per output id, or none at all."""
    column = table.column("output_mask")
    n_mask, n_ids = lengths(column), lengths(table.column("output_ids"))
    odd = (n_mask != n_ids) & ~nulls(column)
    yield broken(odd, "{} elements of output_mask for {} output_ids", n_mask, n_ids)
    yield from no_null("output_mask", table)


def no_null(name: str, table: pa.Table) -> Iterator[Violation]:
    """No element of a list column is null."""
    for start, ends, values in flat_chunks(table.column(name)):
        if values.null_count:
            yield broken_items(start, ends, values.is_null(), f"{name}[{{}}] is null")


def payloads(table: pa.Table) -> Iterator[Violation]:
    """The rules of `trajkit.schema.PAYLOADS` that do not depend on other turns."""
    for name in ("ref_logprobs", "teacher_logprobs"):
        for start, ends, values in _payload(table, name, pa.types.is_floating):
            numbers = values.cast(pa.float64()).fill_null(0.0).to_numpy()
            rule = f"{name}[{{}}] is {{}}: "
            bad = ~np.isfinite(numbers)
            yield broken_items(start, ends, bad, rule + "it is not a number", numbers)
            bad = numbers > MAX_LOGPROB
            yield broken_items(start, ends, bad, rule + _POSITIVE, numbers)
    if "sampling_mask_start" not in table.column_names:
        yield from _sampling_mask(table)


def _sampling_mask(table: pa.Table) -> Iterator[Violation]:
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


def not_logprobs(numbers: npt.NDArray[np.float32]) -> Bools:
    """Where an engine had no logprob: NaN, an infinity, -9999 and below."""
    return ~np.isfinite(numbers) | (numbers <= NO_LOGPROB)


def weight_versions(table: pa.Table) -> Iterator[Violation]:
    """Spans without nulls that tile the output, in order."""
    column = table.column("weight_versions")
    n_output, given = lengths(table.column("output_ids")), ~nulls(column)
    for start, ends, spans in flat_chunks(column):
        lacking = lacks(spans, "version", "start", "stop")
        rule = "weight_versions[{}] has a null: version, start and stop are needed"
        yield broken_items(start, ends, lacking, rule)
        if lacking.any():
            continue
        lows = np.asarray(pc.struct_field(spans, "start"))
        highs = np.asarray(pc.struct_field(spans, "stop"))
        begins = np.append(0, ends)[:-1]
        filled = np.flatnonzero(ends > begins)
        due = np.append(0, highs)[: len(lows)]
        due[begins[filled]] = 0
        yield broken_items(
            start,
            ends,
            (lows != due) | (highs < lows),
            "weight_versions[{}] is {}:{}, expected a start of {}: the spans tile the "
            "output",
            lows,
            highs,
            due,
        )
        last = np.zeros(len(table), np.int64)
        last[start + filled] = highs[ends[filled] - 1]
        here = np.zeros(len(table), np.bool_)
        here[start : start + len(ends)] = True
        yield broken(
            here & given & (last != n_output),
            "weight_versions end at {} of {} output ids: the spans tile the output",
            last,
            n_output,
        )


def lacks(structs: pa.StructArray, *names: str) -> Bools:
    """Where a struct, or one of these fields, is null."""
    fields = (pc.struct_field(structs, name) for name in names)
    found: Bools = np.any(
        [np.asarray(part.is_null()) for part in (structs, *fields)], axis=0
    )
    return found


def mm_items(table: pa.Table) -> Iterator[Violation]:
    """Images are in the prompt or row, in order; their tokens are their content ids."""
    if not has_items(table):
        return
    of_rows = "row_index" in table.column_names
    name, first = "input_ids" if of_rows else "prompt_ids", np.zeros(len(table))
    if name not in table.column_names:
        stored_from = "suffix_start" if of_rows else "shared_length"
        name, first = "suffix_ids", table.column(stored_from).to_numpy()
    faults: dict[int, str] = {}
    for row, listed in enumerate(table.column("mm_items").to_pylist()):
        if listed:
            ids = table.column(name)[row].values.to_numpy()
            found = image_faults(listed, ids, int(first[row]), may_be_cut=of_rows)
            for _, fault in found:
                faults.setdefault(row, fault)
    yield violation(np.array([*faults], np.int64), "{}", list(faults.values()))


def messages(name: str, table: pa.Table) -> Iterator[Violation]:
    """Every message of a column has a key and a role."""
    for start, ends, values in flat_chunks(table.column(name)):
        yield broken_items(start, ends, values.is_null(), f"{name}[{{}}] is null")
        for field in ("key", "role"):
            lacking = pc.struct_field(values, field).is_null()
            yield broken_items(start, ends, lacking, f"{name}[{{}}] has no {field}")


def response(table: pa.Table) -> Iterator[Violation]:
    """Every response that is not null has a key and a role."""
    column = table.column("response").combine_chunks()
    for field in ("key", "role"):
        lacking = pc.and_(column.is_valid(), pc.struct_field(column, field).is_null())
        yield broken(lacking, f"response has no {field}")


def bodies(name: str, table: pa.Table) -> Iterator[Violation]:
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
    yield violation(
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
    yield violation(
        rows[other],
        "the message with the key {} has another body earlier in the session: "
        "compute its key with trajkit.turns.message_key",
        [keys[int(at)].as_py().hex() for at in other],
    )
    faults = {
        int(at): fault
        for at in given
        if (fault := _body_fault(texts[at].as_py(), roles[at].as_py())) is not None
    }
    yield violation(rows[list(faults)], "{}", list(faults.values()))


def _is_same(body: str, other: str) -> bool:
    """Whether two bodies are of messages that are ``==``."""
    try:
        return parse_json(body) == parse_json(other)
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


def delta(table: pa.Table) -> Iterator[Violation]:
    """The base of a turn is an earlier turn and has what is shared with it."""
    bases = table.column("base_turn")
    none = nulls(bases)
    base_row, found = lookup(table, "turn_index", bases)
    late = base_row >= np.arange(len(table))
    bad = ~none & (~found | late)
    yield broken(bad, "base_turn {} is not an earlier turn of the session", bases)
    if bad.any():
        return

    shared = table.column("shared_length").to_numpy()
    full = shared + lengths(table.column("suffix_ids"))
    path_len = np.where(none, 0, (full + lengths(table.column("output_ids")))[base_row])
    yield broken(
        (shared < 0) | (shared > path_len),
        "shared_length is {}: expected 0 to {}, tokens of the base turn",
        shared,
        path_len,
    )
    listed, shares = table.column("suffix_messages"), table.column("shared_messages")
    yield broken(
        nulls(listed) != nulls(shares),
        "shared_messages and suffix_messages are null together",
    )
    n_shared = shares.fill_null(0).to_numpy()
    total = n_shared + lengths(listed) + ~nulls(table.column("response"))
    there = np.where(none | nulls(listed)[base_row], 0, total[base_row])
    yield broken(
        (n_shared < 0) | (n_shared > there),
        "shared_messages is {}: expected 0 to {}, messages of the base turn",
        n_shared,
        there,
    )


def lookup(table: pa.Table, index: str, wanted: pa.ChunkedArray) -> tuple[Rows, Bools]:
    """The row of each wanted index in its session, and whether it was found.

    Sessions are contiguous and ``index`` ascends in each. Null is never found.
    """
    starts = run_starts(table)
    session: Rows = np.searchsorted(starts, np.arange(len(table)), side="right") << 32
    have = session + table.column(index).to_numpy()
    seek = session + wanted.fill_null(-1).to_numpy()
    row = np.minimum(np.searchsorted(have, seek), max(len(table) - 1, 0))
    found = (have[row] == seek) & ~nulls(wanted)
    return np.where(found, row, 0), found


def nulls(column: pa.ChunkedArray) -> Bools:
    """Where the column is null."""
    return np.asarray(column.is_null().to_numpy())


def flat_chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Rows, pa.Array]]:
    """The first row, the ends of lists and the values of each chunk of lists."""
    start = 0
    for chunk in column.chunks:
        n = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
        yield start, np.cumsum(n, dtype=np.int64), chunk.flatten()
        start += len(chunk)


def owners(at: Rows, ends: Rows) -> tuple[Rows, Rows]:
    """The list of each value position, and the index in the list."""
    rows: Rows = np.searchsorted(ends, at, side="right")
    begins = np.concatenate([[0], ends])
    return rows, at - begins[rows]


def raw_floats(values: pa.FloatArray) -> npt.NDArray[np.float32]:
    """The numbers of an array, with the bytes under nulls as they are."""
    data = values.buffers()[1]
    if data is None:
        return np.empty(0, np.float32)
    # a buffer may be longer than its values
    return np.frombuffer(data, np.float32, len(values), 4 * values.offset)
