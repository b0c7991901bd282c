"""How each prompt departs from what was held: the ``drift`` table."""

from typing import overload

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit._arrow.canonical import TableLike
from trajkit._streams.lockstep import Source, Stream, over_sessions
from trajkit.analysis.drift_findings import MIN_RUN, find_causes
from trajkit.analysis.tokenizer import Codec, Tokenizer
from trajkit.pipeline.links import measure, read_links
from trajkit.schema import CAUSES, DRIFT, REGIONS, TEXT_CAUSES
from trajkit.turns.calls import Calls, Longs, Records, read_calls
from trajkit.turns.prefix_forest import Forest, grow
from trajkit.turns.records import as_turns


@overload
def classify_drift(
    turns: Stream | pa.RecordBatchReader,
    links: Source,
    *,
    min_run: int = ...,
    tokenizer: Tokenizer | None = ...,
) -> Stream: ...
@overload
def classify_drift(
    turns: TableLike,
    links: TableLike,
    *,
    min_run: int = ...,
    tokenizer: Tokenizer | None = ...,
) -> pa.Table: ...
def classify_drift(
    turns: Source,
    links: Source,
    *,
    min_run: int = MIN_RUN,
    tokenizer: Tokenizer | None = None,
) -> pa.Table | Stream:
    """How the prompt of each linked turn departs from its parent's prompt and output.

    Parameters
    ----------
    turns : table, or iterator of record batches
        `trajkit.schema.TURNS` in full or delta form. An iterator (or a
        RecordBatchReader) is read as the result is, and may hold a session in several
        batches that follow each other.
    links : table, or iterator of record batches
        `trajkit.schema.LINKS` of the same turns, as `trajkit.link` gives it. An
        iterator is read side by side with that of ``turns``.
    min_run : int
        Length, in tokens, from which a common run counts as back in step.
    tokenizer : Tokenizer, optional
        The one that the ids are of, as `analysis.check_roundtrip` takes it: ``cause`` is
        then that of the first finding of `trajkit.analysis.explain_drift`
        (`trajkit.schema.TEXT_CAUSES`), or ``clean``.

    Returns
    -------
    Table
        `trajkit.schema.DRIFT`, one row per turn that has a parent; for iterators, an
        iterator of record batches. With held = parent prompt ++ parent output:

        lcp, size
            Tokens that held and the prompt share at their start, and held tokens
            beyond.
        region
            ``none`` (size 0), ``last_reply`` (lcp lies in the parent's output),
            ``earlier_reply`` (in an output before it that stands unchanged in held),
            ``prompt`` (elsewhere).
        resync_path, resync_prompt, resync_length
            The longest run of ``min_run`` tokens or more that both have beyond lcp, the
            first in the prompt, or failing that the longest (shorter) run that ends
            where the message in which drift starts ends in held. Null where there is
            none.
        tokens_after_drift
            Sampled tokens, of the parent and of replies before it, that stand in held
            at or beyond lcp.
        cause
            ``clean``; ``truncated`` (the prompt ends at lcp); ``head_dropped`` (what
            follows in the prompt at lcp is found further on in held, min_run tokens or
            more); ``middle_edited`` (they are back in step further on in the prompt);
            ``tail_changed`` (the last reply came back changed and not in step again);
            ``diverged`` (any other).

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`; the tokenizer lacks a method.
    PolicyError
        ``min_run`` is no integer of 1 or more.
    """
    min_run = chosen_int("min_run", min_run, 1)
    codec = None if tokenizer is None else Codec(tokenizer)

    def one(turns: pa.Table, links: pa.Table) -> pa.Table:
        calls = read_calls(turns)
        records = read_links(calls, links)
        forest = grow(calls)
        measure(calls, forest, records)
        table = drift_table(calls, forest, records, min_run)
        if codec is None:
            return table
        return _with_text_causes(table, calls, forest, records, codec, min_run)

    return over_sessions(one, ("turns", turns), ("links", links), table_of=as_turns)


def _with_text_causes(
    table: pa.Table,
    calls: Calls,
    forest: Forest,
    records: Records,
    codec: Codec,
    min_run: int,
) -> pa.Table:
    """The ``drift`` table with the causes that the texts tell."""
    names = ("clean", *TEXT_CAUSES)
    codes = np.zeros(len(calls.calls), np.int8)
    for one in find_causes(calls, forest, records, codec, min_run):
        if one.number == 0:
            codes[one.call] = names.index(one.cause)
    cause = pa.DictionaryArray.from_arrays(
        pa.array(codes[records["parent"] >= 0]), pa.array(names)
    )
    at = table.schema.get_field_index("cause")
    return table.set_column(at, table.schema.field(at), cause)


def drift_table(
    calls: Calls, forest: Forest, links: Records, min_run: int = MIN_RUN
) -> pa.Table:
    """The ``drift`` table of links whose ``lcp`` is known."""
    longest = int(calls.held.max(initial=0))
    n_table = 1 << max((2 * longest - 1).bit_length(), 1)
    found = np.zeros((len(links), 6), np.int64)
    found[:, 1:4] = -1
    _core.describe_drift(
        calls.calls,
        forest.nodes,
        forest.ends,
        links,
        min_run,
        np.empty((2, longest), np.int32),
        np.empty(n_table, np.uint64),
        np.empty(n_table, np.int32),
        found,
    )
    rows = np.flatnonzero(links["parent"] >= 0)
    found, linked = found[rows], links[rows]
    nowhere = found[:, 3] < 0
    size = calls.held[linked["parent"]] - linked["lcp"]

    def names(codes: Longs, of: tuple[str, ...]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(codes.astype(np.int8), pa.array(of))

    def where(column: int) -> pa.Array:
        return pa.array(found[:, column].astype(np.int32), mask=nowhere)

    taken = calls.table.select(["session_id", "turn_index"]).take(rows)
    return pa.Table.from_arrays(
        [
            taken.column("session_id"),
            taken.column("turn_index"),
            pa.array(calls.turn_index[linked["parent"]]),
            pa.array(linked["lcp"].astype(np.int32)),
            pa.array(size.astype(np.int32)),
            names(found[:, 0], REGIONS),
            where(1),
            where(2),
            where(3),
            pa.array(found[:, 4].astype(np.int32)),
            names(found[:, 5], CAUSES),
        ],
        schema=DRIFT,
    )
