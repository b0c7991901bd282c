"""Classify how each prompt departs from its parent's path: the ``drift`` table."""

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit._kernel_names import numbers
from trajkit.analysis.drift_findings import MIN_RUN, find_causes
from trajkit.analysis.tokenizer import Codec, Tokenizer
from trajkit.analysis.turn_lines import codes, turn_lines
from trajkit.rows.links import read_linked
from trajkit.schema import CAUSES, DRIFT, REGIONS, TEXT_CAUSES
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Records
from trajkit.tables.stages import Source, apply, stage
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions

DESCRIBED = tuple(_core.ENUMS["DriftLine"])
"""The columns that the kernel fills, in its order (_native/drift.pxi)."""
numbers("Region", REGIONS)
numbers("Cause", CAUSES)


@stage
def classify_drift(
    turns: TableLike,
    links: Source,
    *,
    min_run: int = MIN_RUN,
    tokenizer: Tokenizer | None = None,
) -> pa.Table:
    """Classify how the prompt of each linked turn departs from its parent's path.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    links : table
        `trajkit.schema.LINKS` of the same turns, from `trajkit.link`.
        `classify_drift_batches` also takes its batches, and reads them in step with the
        turns.
    min_run : int
        Tokens that prompt and path must have in common to agree again after drift.
    tokenizer : Tokenizer, optional
        The engine's tokenizer, as `analysis.check_roundtrip` takes it. ``cause`` is
        then the cause of the first finding of `trajkit.analysis.explain_drift`
        (`trajkit.schema.TEXT_CAUSES`), or ``clean``.

    Returns
    -------
    Table
        `trajkit.schema.DRIFT`, one row per turn with a parent. *Path* is the path of
        the parent.

        lcp, size
            Length of the longest common prefix of path and prompt, and the number of
            tokens that follow in the path.
        region
            ``none`` (size 0), ``last_reply`` (lcp is in the parent's output),
            ``earlier_reply`` (in an earlier output that the path has unchanged),
            ``prompt`` (in other tokens).
        resync_path, resync_prompt, resync_length
            The longest common run of ``min_run`` tokens or more after lcp, the first in
            the prompt. Without one: the longest shorter run that ends at the end of the
            message in which drift starts. Null otherwise.
        tokens_after_drift
            Sampled tokens of the path, of any reply, at or after lcp.
        cause
            ``clean``; ``truncated`` (the prompt ends at lcp); ``head_dropped`` (at
            least min_run tokens at lcp in the prompt are found later in the path);
            ``middle_edited`` (they agree again later in the prompt); ``tail_changed``
            (the last reply changed and they do not agree again); ``diverged`` (any
            other).

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`; the tokenizer lacks a method.
    ArgumentError
        ``min_run`` is not an integer of 1 or more.
    """
    min_run = chosen_int("min_run", min_run, 1)
    codec = None if tokenizer is None else Codec(tokenizer)

    def one(turns: pa.Table, links: pa.Table) -> pa.Table:
        calls, forest, records = read_linked(turns, links)
        table = drift_table(calls, forest, records, min_run)
        if codec is None:
            return table
        return _with_text_causes(table, calls, forest, records, codec, min_run)

    return apply(one, turns, table_of=as_turns, links=links)


classify_drift_batches = classify_drift.batches


def _with_text_causes(
    table: pa.Table,
    calls: Sessions,
    forest: Forest,
    records: Records,
    codec: Codec,
    min_run: int,
) -> pa.Table:
    """The ``drift`` table with causes from the texts."""
    names = ("clean", *TEXT_CAUSES)
    causes = np.zeros(len(calls.calls), np.int8)
    for one in find_causes(calls, forest, records, codec, min_run):
        if one.number == 0:
            causes[one.call] = names.index(one.cause)
    cause = codes(causes[records["parent"] >= 0], names)
    at = table.schema.get_field_index("cause")
    return table.set_column(at, table.schema.field(at), cause)


def drift_table(
    calls: Sessions, forest: Forest, links: Records, min_run: int = MIN_RUN
) -> pa.Table:
    """The ``drift`` table of links whose ``lcp`` is known."""
    described = np.zeros((len(DESCRIBED), len(links)), np.int64)
    found = dict(zip(DESCRIBED, described, strict=True))
    for name in ("resync_path", "resync_prompt", "resync_length"):
        found[name][:] = -1
    _core.describe_drift(forest.paths, links, min_run, described)
    rows = np.flatnonzero(links["parent"] >= 0)
    found = {name: line[rows] for name, line in found.items()}
    linked = links[rows]
    nowhere = found["resync_length"] < 0
    size = calls.path_len[linked["parent"]] - linked["lcp"]

    def where(name: str) -> pa.Array:
        return pa.array(found[name].astype(np.int32), mask=nowhere)

    return turn_lines(
        DRIFT,
        calls,
        rows,
        calls.turn_index[linked["parent"]],
        linked["lcp"],
        size,
        codes(found["region"], REGIONS),
        where("resync_path"),
        where("resync_prompt"),
        where("resync_length"),
        found["tokens_after_drift"],
        codes(found["cause"], CAUSES),
    )
