"""What tables are made of, columns with types, null rules and rules, and their checks.

A rule is a generator of faults: the rows that break it, and the words for each, with
column, value and rule. `trajkit.validate` adds session and turn. Tables are in canonical
form; pyarrow.compute is left alone, so that importing a schema is cheap.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION = 3
# versions that are read
SCHEMA_VERSIONS = (2, 3)

NAMES = pa.dictionary(pa.int8(), pa.string())
"""The type of a column with a small set of names."""

Bools: TypeAlias = npt.NDArray[np.bool_]
Longs: TypeAlias = npt.NDArray[np.int64]
Fault: TypeAlias = tuple[Longs, Callable[[int], str]]
"""Rows that break a rule, and a function that explains the k-th of them."""

Check: TypeAlias = Callable[[pa.Table], Iterator[Fault]]
"""A rule of a table in canonical form. It may rely on the rules before it."""

Rule: TypeAlias = Callable[[str, pa.Table], Iterator[Fault]]
"""A rule of a column, given its name and the table."""

MAX_LOGPROB = np.float32(1e-4)
"""Rounding may take a logprob this far above 0."""
NO_LOGPROB = np.float32(-9999.0)
"""vLLM writes this for a token without a logprob; sampled tokens never have it."""

_NO_NUMBER = "it is not a number (nonfinite_logprobs='null' makes it null)"
_NO_LOGPROB = (
    "engines write this if they have no logprob for a token "
    "(nonfinite_logprobs='null' makes it null)"
)
ID_RULE = "token ids are integers in [0, 2**31)"
POSITIVE = "a log-probability is at most 0 (1e-4 is tolerated for rounding)"


_TYPES = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "text": pa.string(),
    "name": NAMES,
    "key": pa.binary(16),
}
"""The types of columns, those of structs included, by the name that texts give them."""

_HEAD: Any = re.compile(r"(?P<name>\w+)(?: \((?P<rules>[\w, ]+)\))?\n")
_LINE = re.compile(
    r"^(?P<names>\w+(?:, \w+)*) (?P<list>\[)?(?P<type>\w+)\]?(?P<null>\?)?"
    r"(?: \((?P<rules>[\w, ]+)\))?(?::|$)",
    re.MULTILINE,
)


_CHECKS: dict[pa.Schema, tuple[tuple[str | None, Check], ...]] = {}


def described(text: str, *more: pa.Field, **named: Any) -> pa.Schema:
    """The table that a text describes: its kind, and its columns, a line each.

    ``kind (rule, rule)``, then ``name type (rule, rule): meaning``. ``[int32]`` is a list,
    ``int32?`` may be null, which means unknown or none. Lines that are indented further go
    on. Rules are those of this module, or ``named``; those of the table come last. There
    may be ``more`` columns, without rules.
    """
    head = _HEAD.match(text)
    fields = [*_fields(text), *more]
    metadata = {"trajkit.table": head["name"], "trajkit.version": str(SCHEMA_VERSION)}
    schema = pa.schema(fields, metadata=metadata)
    checks = [
        (name, partial(rule, name))
        for line in _LINE.finditer(text)
        for name in line["names"].split(", ")
        for rule in _rules(line, named)
    ]
    _CHECKS[schema] = (*checks, *((None, rule) for rule in _rules(head, named)))
    return schema


def struct(text: str) -> pa.StructType:
    """The type with the fields of a text, under the name on its first line."""
    type_ = pa.struct(_fields(text))
    _TYPES[_HEAD.match(text)["name"]] = type_
    return type_


def _fields(text: str) -> list[pa.Field]:
    found = []
    for line in _LINE.finditer(text):
        type_ = _TYPES[line["type"]]
        type_ = pa.large_list(type_) if line["list"] else type_
        for name in line["names"].split(", "):
            found.append(pa.field(name, type_, nullable=bool(line["null"])))
    return found


def _rules(line: Any, named: dict[str, Any]) -> list[Any]:
    names = line["rules"].split(", ") if line["rules"] else []
    found = [{**globals(), **named}[name] for name in names]
    # a name may stand for several rules
    return [r for one in found for r in (one if isinstance(one, tuple) else [one])]


def checks_of(
    schema: pa.Schema, columns: tuple[str, ...] | None = None
) -> tuple[Check, ...]:
    """The rules of a table, or those of some of its columns alone."""
    return tuple(
        check for name, check in _CHECKS[schema] if columns is None or name in columns
    )


def meanings(text: str) -> dict[str, str]:
    """The names that a text defines, which begin its lines, and what it says of them:
    ``name, name: meaning``.
    """
    lines = re.findall(
        r"^([a-z_]+(?:, [a-z_]+)*): (.*(?:\n    .*)*)", text, re.MULTILINE
    )
    return {
        name: " ".join(meaning.split())
        for names, meaning in lines
        for name in names.split(", ")
    }


def defined(text: str) -> tuple[str, ...]:
    """The names of `meanings`."""
    return tuple(meanings(text))


@dataclass(frozen=True, slots=True)
class Violation:
    """A finding in words, and where it is: a line of a table of violations."""

    # None: of no one of them
    rule: str
    detail: str
    session_id: str | None = None
    row_index: int | None = None
    turn_index: int | None = None
    token: int | None = None
    pack: int | None = None
    row_token: int | None = None


def as_lines(found: Sequence[Violation], schema: pa.Schema) -> pa.Table:
    lines = [{name: getattr(one, name) for name in schema.names} for one in found]
    return pa.Table.from_pylist(lines, schema)


def shown(value: object) -> object:
    return "null" if value is None else value


# Faults


def fault(rows: Longs, template: str, *columns: Any) -> Fault:
    """A fault; the k-th value of each column fills the template."""
    return rows, lambda k: template.format(*(column[k] for column in columns))


def broken(bad: npt.ArrayLike, template: str, *columns: Any) -> Fault:
    """The rows where ``bad`` is true; a row's value of each column fills the template."""
    rows = np.flatnonzero(bad)
    return rows, lambda k: template.format(*_values(columns, int(rows[k])))


def broken_items(
    start: int, ends: Longs, bad: npt.ArrayLike, template: str, *columns: Any
) -> Fault:
    """As `broken`, for the elements of lists, see `flat_chunks`.

    The template first gets the index of the element in its list.
    """
    at = np.flatnonzero(bad)
    rows, index = owners(at, ends)
    return start + rows, lambda k: template.format(
        index[k], *_values(columns, int(at[k]))
    )


def _values(columns: tuple[Any, ...], at: int) -> list[object]:
    values = [column[at] for column in columns]
    return [v.as_py() if isinstance(v, pa.Scalar) else v for v in values]


# Columns as arrays


def numbers(table: pa.Table, *names: str) -> Any:
    """The values of a column of numbers, 0 for null; of several, one array each."""
    found = [table.column(name).fill_null(0).to_numpy() for name in names]
    return found if len(names) > 1 else found[0]


def repeated(values: Longs) -> Bools:
    again = np.ones(len(values), np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again


def not_logprobs(numbers: npt.NDArray[np.float32]) -> Bools:
    """Where an engine had no logprob: NaN, an infinity, -9999 and below."""
    return ~np.isfinite(numbers) | (numbers <= NO_LOGPROB)


def lacks(structs: pa.StructArray, *names: str) -> Bools:
    """Where a struct, or one of these fields, is null."""
    parts = (structs, *(field_of(structs, name) for name in names))
    lacking: Bools = np.any([np.asarray(part.is_null()) for part in parts], axis=0)
    return lacking


def field_of(structs: pa.StructArray, name: str) -> pa.Array:
    """A field of structs, null where the struct is."""
    if not structs.null_count:
        return structs.field(name)
    return structs.flatten()[structs.type.get_field_index(name)]


def fields_of(structs: pa.StructArray, *names: str) -> list[Longs]:
    """Fields of integers, -1 for null."""
    return [filled(field_of(structs, name), -1).astype(np.int64) for name in names]


@dataclass(frozen=True, slots=True)
class Keys:
    """A session and an index for each of many things; a negative part is of no key."""

    # shape (n_keys,)
    session: npt.NDArray[np.integer]
    index: npt.NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.session)

    def packed(self) -> Longs:
        """The keys as numbers, in the order of sessions and then of indices."""
        packed: Longs = (self.session.astype(np.int64) << 32) + self.index
        return packed

    def find(self, others: "Keys") -> Longs:
        """The position here of each other key, or -1; the first of equal ones."""
        have, seek = self.packed(), others.packed()
        order = None
        if (have[1:] < have[:-1]).any():
            order = np.argsort(have, kind="stable")
            have = have[order]
        at = np.searchsorted(have, seek)
        found = (others.session >= 0) & (others.index >= 0) & (at < len(have))
        found[found] = have[at[found]] == seek[found]
        if order is not None:
            at[found] = order[at[found]]
        return np.where(found, at, -1)


def lookup(table: pa.Table, index: str, wanted: pa.ChunkedArray) -> tuple[Longs, Bools]:
    """The row of each wanted index in its session, and whether it is there; null is not."""
    session = session_numbers(table)
    wanted_keys = Keys(session, wanted.fill_null(-1).to_numpy())
    row = Keys(session, table.column(index).to_numpy()).find(wanted_keys)
    return np.maximum(row, 0), row >= 0


def run_starts(table: pa.Table) -> Longs:
    return np.flatnonzero(np.diff(codes(table.column("session_id")), prepend=-1))


def session_numbers(table: pa.Table) -> Longs:
    """The number of each row's session, counted from 1."""
    rows = np.arange(len(table))
    numbers: Longs = np.searchsorted(run_starts(table), rows, side="right")
    return numbers


def codes(*columns: pa.Array | pa.ChunkedArray) -> Longs:
    """A number for each distinct value, counted up from 0 in the order of first use.

    Of several columns, one after another, equal values have one number. Null is a value.
    """
    listed = [c.chunks if isinstance(c, pa.ChunkedArray) else [c] for c in columns]
    chunks = [chunk for chunks in listed for chunk in chunks]
    if not chunks:
        return np.zeros(0, np.int64)
    values = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    return np.asarray(values.dictionary_encode("encode").indices, np.int64)


def lengths(column: pa.ChunkedArray | pa.Array) -> Longs:
    """Elements of each list, of any of Arrow's list types; 0 for a null list."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.asarray(chunk.value_lengths().fill_null(0)) for chunk in chunks]
    return np.concatenate([np.empty(0, np.int64), *parts])


def list_values(column: pa.ChunkedArray) -> pa.Array:
    """The elements of all lists of a column, end to end."""
    parts = [chunk.flatten() for chunk in column.chunks]
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays([pa.array([], column.type.value_type), *parts])


def filled(values: pa.Array, fill: object) -> Any:
    """The values as an array of numpy, ``fill`` for null; not copied if there is none."""
    values = values.fill_null(fill) if values.null_count else values
    return values.to_numpy(zero_copy_only=False)


def nulls(column: pa.ChunkedArray) -> Bools:
    return np.asarray(column.is_null().to_numpy())


def flat_chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Longs, pa.Array]]:
    """The first row, the ends of lists and the values of each chunk of lists."""
    start = 0
    for chunk in column.chunks:
        yield start, np.cumsum(lengths(chunk), dtype=np.int64), chunk.flatten()
        start += len(chunk)


def owners(at: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """The list of each value position, and the index in the list."""
    rows: Longs = np.searchsorted(ends, at, side="right")
    return rows, at - np.append(0, ends)[rows]


# Rules of columns


def contiguous(name: str, table: pa.Table) -> Iterator[Fault]:
    starts = run_starts(table)
    numbers = codes(table.column(name))[starts]
    first = np.unique(numbers, return_index=True)[1]
    again = np.flatnonzero(first[numbers] != np.arange(len(numbers)))
    yield fault(
        starts[again],
        "the session began in table row {} and comes back in row {} after another: "
        "make it contiguous, for instance by sorting the table by session_id",
        starts[first[numbers[again]]],
        starts[again],
    )


def ascending(index: str, table: pa.Table) -> Iterator[Fault]:
    """`index` ascends within each session, from 0 or above."""
    values = table.column(index).to_numpy()
    yield broken(values < 0, f"{index} is negative: it counts from 0")
    before = np.append(-1, values)[: len(values)]
    before[run_starts(table)] = -1
    yield broken(values == before, f"{index} is repeated within the session")
    rule = f"{index} {{}} follows {{}}: it must ascend within a session"
    yield broken(values < before, rule, values, before)


def one_row_per_session(name: str, table: pa.Table) -> Iterator[Fault]:
    again = repeated(codes(table.column(name)))
    yield broken(again, "the session has a row already")


def _numbers(fits: Callable[[Any], Bools], rule: str) -> Rule:
    """A rule of a column of numbers, which null keeps."""

    def check(name: str, table: pa.Table) -> Iterator[Fault]:
        values = numbers(table, name)
        yield broken(~fits(values), f"{name} is {{}}: {rule}", values)

    return check


def _is_share(values: Any) -> Bools:
    share: Bools = (values >= 0) & (values <= 1)
    return share


finite = _numbers(np.isfinite, "expected a finite number or null")
not_negative = _numbers(lambda values: values >= 0, "it must not be negative")
is_share = _numbers(_is_share, "it is a share of the rollout")


def differ(name: str, table: pa.Table) -> Iterator[Fault]:
    """Values are unique in each session."""
    column = table.column(name)
    again = ~nulls(column)
    values = (session_numbers(table) << 32) + numbers(table, name)
    again[again] = repeated(values[again])
    yield broken(again, f"{name} {{}} is repeated within the session", column)


def one_of(known: tuple[str, ...]) -> Rule:
    """A column contains only known names and null."""

    def rule(name: str, table: pa.Table) -> Iterator[Fault]:
        text = table.column(name).cast(pa.string()).to_pylist()
        bad = [value is not None and value not in known for value in text]
        words = f"{name} is {{!r}}: expected one of {', '.join(known)}"
        yield broken(bad, words, text)

    return rule


def refers(index: str, fits: Callable[[Longs, Longs], Bools], what: str) -> Rule:
    """A reference is null, or an index that fits the row's own."""

    def rule(name: str, table: pa.Table) -> Iterator[Fault]:
        column = table.column(name)
        values = column.fill_null(-1).to_numpy()
        good = (values >= 0) & fits(values, table.column(index).to_numpy())
        words = f"{name} {{}} is not {what} of the session"
        yield broken(~good & ~nulls(column), words, values)

    return rule


another = refers("turn_index", np.not_equal, "another turn_index")
later = refers("turn_index", np.greater, "a later turn")
earlier = refers("row_index", np.less, "an earlier row_index")


def turn_exists(name: str, table: pa.Table) -> Iterator[Fault]:
    """A reference is to a turn of the session, or null."""
    column = table.column(name)
    known = lookup(table, "turn_index", column)[1]
    words = f"{name} {{}} is not a turn of the session"
    yield broken(~known & ~nulls(column), words, column)


def _elements(bad: Callable[[pa.Array], npt.ArrayLike], words: str) -> Rule:
    """A rule of the elements of lists, and the words for a ``bad`` one."""

    def check(name: str, table: pa.Table) -> Iterator[Fault]:
        for start, ends, values in flat_chunks(table.column(name)):
            text = f"{name}[{{}}] {words}"
            yield broken_items(start, ends, bad(values), text, values)

    return check


def _null(values: pa.Array) -> npt.ArrayLike:
    # Arrow's bits become numpy's bytes slowly
    return values.is_null() if values.null_count else ()


def _negative(ids: pa.Array) -> npt.ArrayLike:
    # a minimum is found faster than written flags
    numbers = filled(ids, 0)
    return numbers < 0 if numbers.min(initial=0) < 0 else ()


no_null = _elements(_null, "is null")
no_negative = _elements(_negative, f"is {{}}: {ID_RULE}")
has_key = _elements(lambda of: _null(field_of(of, "key")), "has no key")
has_role = _elements(lambda of: _null(field_of(of, "role")), "has no role")
token_ids = (no_null, no_negative)
no_key_missing = (no_null, has_key, has_role)


def as_long_as(ids: str, name: str, what: str, table: pa.Table) -> Iterator[Fault]:
    """A list is null, or has one element per id; ``what`` is its number in words."""
    column = table.column(name)
    n_here, n_ids = lengths(column), lengths(table.column(ids))
    odd = (n_here != n_ids) & ~nulls(column)
    yield broken(odd, f"{what} for {{}} {ids}", n_here, n_ids)


def per_token(ids: str, names: tuple[str, ...], table: pa.Table) -> Iterator[Fault]:
    """Lists have an element for each of these ids."""
    for name in names:
        yield from as_long_as(ids, name, f"{{}} elements of {name}", table)


def logprobs(ids: str) -> Rule:
    """A column has one log-probability per id of another, or none at all."""

    def rule(name: str, table: pa.Table) -> Iterator[Fault]:
        yield from as_long_as(ids, name, "{} " + name, table)
        for start, ends, values in flat_chunks(table.column(name)):
            numbers = filled(values, 0.0)
            for wrong, text in (
                (np.isnan(numbers), _NO_NUMBER),
                (numbers <= NO_LOGPROB, _NO_LOGPROB),
                (numbers > MAX_LOGPROB, POSITIVE),
            ):
                words = f"{name}[{{}}] is {{}}: {text}"
                yield broken_items(start, ends, wrong, words, numbers)

    return rule


logprob_per_output = logprobs("output_ids")
logprob_per_id = logprobs("input_ids")


def mask_per_output(name: str, table: pa.Table) -> Iterator[Fault]:
    """One bool per output id, or none at all."""
    yield from as_long_as("output_ids", name, f"{{}} elements of {name}", table)
    yield from no_null(name, table)


def reply_has_key(name: str, table: pa.Table) -> Iterator[Fault]:
    column = table.column(name).combine_chunks()
    given = np.asarray(column.is_valid())
    for field in ("key", "role"):
        lacking = given & np.asarray(field_of(column, field).is_null())
        yield broken(lacking, f"{name} has no {field}")


SPAN_NUMBERS = ("start", "stop", "turn_index", "output_start", "output_stop")
"""The fields of a row's spans but for the kind."""
no_span_null = _elements(
    lambda spans: lacks(spans, *SPAN_NUMBERS, "kind"), "has a null"
)


def tile_outputs(name: str, table: pa.Table) -> Iterator[Fault]:
    """Spans without nulls that tile the output, in order."""
    column = table.column(name)
    spans, ends = list_values(column), np.cumsum(lengths(column))
    lacking = lacks(spans, "version", "start", "stop")
    rule = f"{name}[{{}}] has a null: version, start and stop are needed"
    yield broken_items(0, ends, lacking, rule)
    low, high = fields_of(spans, "start", "stop")
    begins = np.append(0, ends)[:-1]
    filled = np.flatnonzero(ends > begins)
    due = np.append(0, high)[: len(low)]
    due[begins[filled]] = 0
    rule = f"{name}[{{}}] is {{}}:{{}}, expected a start of {{}}: the spans tile the output"
    bad = (low != due) | (high < low)
    yield broken_items(0, ends, bad, rule, low, high, due)
    last, n_output = np.zeros_like(ends), lengths(table.column("output_ids"))
    last[filled] = high[ends[filled] - 1]
    rule = f"{name} end at {{}} of {{}} output ids: the spans tile the output"
    yield broken(~nulls(column) & (last != n_output), rule, last, n_output)


# Rules of tables


def not_empty(table: pa.Table) -> Iterator[Fault]:
    is_full = "prompt_ids" in table.column_names
    n_prompt = lengths(table.column("prompt_ids" if is_full else "suffix_ids"))
    if not is_full:
        n_prompt = n_prompt + numbers(table, "shared_length")
    rule = "prompt_ids is empty: an engine samples after some token"
    yield broken(n_prompt == 0, rule)


def delta(table: pa.Table) -> Iterator[Fault]:
    """The base of a turn is an earlier turn and has what is shared with it."""
    bases, listed = table.column("base_turn"), table.column("suffix_messages")
    none, unlisted = nulls(bases), nulls(listed)
    base_row, found = lookup(table, "turn_index", bases)
    bad = ~none & (~found | (base_row >= np.arange(len(table))))
    yield broken(bad, "base_turn {} is not an earlier turn of the session", bases)
    if bad.any():
        return
    shared, shares = numbers(table, "shared_length", "shared_messages")
    n_own, n_output = (lengths(table.column(n)) for n in ("suffix_ids", "output_ids"))
    most = np.where(none, 0, (shared + n_own + n_output)[base_row])
    rule = "shared_length is {}: expected 0 to {}, tokens of the base turn"
    yield broken((shared < 0) | (shared > most), rule, shared, most)
    rule = "shared_messages and suffix_messages are null together"
    yield broken(unlisted != nulls(table.column("shared_messages")), rule)
    total = shares + lengths(listed) + ~nulls(table.column("response"))
    most = np.where(none | unlisted[base_row], 0, total[base_row])
    rule = "shared_messages is {}: expected 0 to {}, messages of the base turn"
    yield broken((shares < 0) | (shares > most), rule, shares, most)


def every_token_counted(losses: tuple[str, ...], table: pa.Table) -> Iterator[Fault]:
    """Every sampled token is trained, or lost for one reason."""
    sampled, *counts = numbers(
        table, "tokens_sampled", "tokens_trained", *(f"lost_{one}" for one in losses)
    )
    counted = np.sum(counts, axis=0)
    rule = "{} tokens sampled, but {} trained or lost"
    yield broken(sampled != counted, rule, sampled, counted)


def row_lengths(table: pa.Table) -> Iterator[Fault]:
    """Per-token columns have the row's length, and no length exceeds it."""
    n_ids, parent = lengths(table.column("input_ids")), table.column("parent_row")
    yield from per_token("input_ids", ("loss_mask", "logprobs"), table)
    for name in ("prompt_length", "shared_length"):
        values = numbers(table, name)
        rule = f"{name} is {{}} in a row of {{}} tokens"
        yield broken(values > n_ids, rule, values, n_ids)
    shared = numbers(table, "shared_length")
    rule = "shared_length is {} without a parent_row"
    yield broken(nulls(parent) & (shared > 0), rule, shared)
    parent_at, found = lookup(table, "row_index", parent)
    of_parent = np.where(found, n_ids[parent_at], 0)
    rule = "shared_length is {}, but the parent row has {} tokens"
    yield broken(found & (shared > of_parent), rule, shared, of_parent)


def masks(table: pa.Table) -> Iterator[Fault]:
    """Prompt tokens are not trained, and only trained tokens have a logprob."""
    mask = np.asarray(list_values(table.column("loss_mask")))
    ends = np.cumsum(lengths(table.column("input_ids")))
    owner, offset = owners(np.flatnonzero(mask), ends)
    prompt = numbers(table, "prompt_length")[owner]
    bad = np.flatnonzero(offset < prompt)
    rule = "loss_mask[{}] is true within the prompt of {} tokens"
    yield fault(owner[bad], rule, offset[bad], prompt[bad])
    given = np.asarray(list_values(table.column("logprobs")).is_valid())
    rule = "logprobs[{}] is not null, but loss_mask is false"
    yield broken_items(0, ends, given & ~mask, rule)
    n_trained = np.bincount(owner, minlength=len(table))
    sums = numbers(table, "rollout_mask_sum")
    rule = "rollout_mask_sum is {} in a row that trains {} tokens"
    yield broken(sums < n_trained, rule, sums, n_trained)


def spans_in_order(
    kinds: tuple[str, ...], empty_kinds: tuple[str, ...], table: pa.Table
) -> Iterator[Fault]:
    """Spans ascend within the row, and trained spans are where the mask is true."""
    n_ids = lengths(table.column("input_ids"))
    listed, ends = list_values(table.column("spans")), lengths(table.column("spans"))
    ends = np.cumsum(ends)
    kind = np.asarray(field_of(listed, "kind").cast(pa.string()))
    start, stop, turn, out_start, out_stop = fields_of(listed, *SPAN_NUMBERS)
    row, at = owners(np.arange(len(kind)), ends)
    before = np.append(0, stop)[: len(stop)]
    before[at == 0] = 0
    inside = (start >= 0) & (stop >= start) & (stop <= n_ids[row])
    trues = np.append(0, np.cumsum(np.asarray(list_values(table.column("loss_mask")))))
    base, size = np.cumsum(n_ids) - n_ids, stop - start
    low, high = (np.where(inside, base[row] + at, 0) for at in (start, stop))
    trained, empty = kind == "trained", np.isin(kind, empty_kinds)
    due = np.where(trained, size, 0)
    for bad, rule in (
        (~np.isin(kind, kinds), f"expected one of {', '.join(kinds)}"),
        (~inside, "it must lie within the row"),
        (start < before, "it must not overlap the previous span"),
        ((out_start < 0) | (out_stop < out_start), "its output range runs backwards"),
        (turn < 0, "its turn_index is negative"),
        (empty & (size != 0), "an absorbed, cut or no_splice_point span is empty"),
        (
            ~empty & (size != out_stop - out_start),
            "it must be as long as its output range",
        ),
        (
            inside & (trues[high] - trues[low] != due),
            "loss_mask is true in trained spans, and only there",
        ),
    ):
        rule = f"spans[{{}}] is {{}}:{{}} of kind {{!r}}: {rule}"
        yield broken_items(0, ends, bad, rule, start, stop, kind)
    claimed = np.bincount(row, due, len(table))
    masked = trues[base + n_ids] - trues[base]
    rule = "loss_mask is true for {} tokens, but the trained spans have {:.0f}"
    yield broken(claimed != masked, rule, masked, claimed)


def parents_first(table: pa.Table) -> Iterator[Fault]:
    """Parents have an order, and precede their children by turn_index or by order."""
    order = table.column("order").fill_null(-1).to_numpy()
    at, found = lookup(table, "turn_index", table.column("parent"))
    followed = found & (order >= 0)
    before, session = np.where(followed, order[at], -1), session_numbers(table)
    later = np.unique(session[followed & (at > np.arange(len(table)))])
    rule = "order {}, but its parent has no order, so it is in no row"
    yield broken(followed & (before < 0), rule, order)
    bad = followed & (before >= order) & np.isin(session, later)
    rule = "order {} does not come after its parent's, {}, in a session with a parent "
    yield broken(bad, rule + "that is a later turn", order, before)


def drift_agrees(table: pa.Table) -> Iterator[Fault]:
    size, after = numbers(table, "size", "tokens_after_drift")
    rule = "tokens_after_drift {} exceeds the size {}"
    yield broken(after > size, rule, after, size)
    for name, word in (("region", "none"), ("cause", "clean")):
        text = table.column(name).cast(pa.string())
        equal = np.array([value == word for value in text.to_pylist()], np.bool_)
        rule = f"{name} is {{!r}} with a size of {{}}: expected {word!r} exactly for size 0"
        yield broken(~nulls(text) & (equal != (size == 0)), rule, text, size)
    names = ("resync_path", "resync_prompt", "resync_length")
    path, prompt, length = (nulls(table.column(name)) for name in names)
    rule = "the three resync columns are null together"
    yield broken((path != prompt) | (path != length), rule)
