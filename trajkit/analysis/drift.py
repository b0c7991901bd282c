"""How prompts depart from their parents' paths: the ``drift`` and ``findings`` tables.

`check_roundtrip` says which replies can't come back as they were sampled.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit._kernel_names import numbers
from trajkit.analysis.drift_text import Side, Stretch, text_cause
from trajkit.analysis.tokenizer import Codec, Tokenizer
from trajkit.rows.links import read_linked
from trajkit.schema import CAUSES, DRIFT, FINDINGS, REGIONS, ROUNDTRIP, TEXT_CAUSES
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Longs, Records
from trajkit.tables.stages import Source, apply, stage
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.python_lists import lcp
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions

DESCRIBED = tuple(_core.ENUMS["DriftLine"])
"""The columns that the kernel fills, in its order (_native/drift/drift.pxi)."""
numbers("Region", REGIONS)
numbers("Cause", CAUSES)

MIN_RUN = 8
"""Contiguous tokens that path and prompt must have in common to agree again."""

# Shorter common runs that may split an unexplained span, and the most parts it may have.
_CLOSER_RUNS = (4, 2, 1)
_MOST_PIECES = 64
# Causes that may hide others. Dropped text is not split at short runs, which are chance.
_COARSE = {"white_space": _CLOSER_RUNS, "reasoning_dropped": _CLOSER_RUNS[:1]}


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
        names = ("clean", *TEXT_CAUSES)
        causes = np.zeros(len(records), np.int8)
        for found in find_causes(calls, forest, records, codec, min_run):
            if found.number == 0:
                causes[found.call] = names.index(found.cause)
        at = table.schema.get_field_index("cause")
        cause = codes(causes[records["parent"] >= 0], names)
        return table.set_column(at, table.schema.field(at), cause)

    return apply(one, turns, table_of=as_turns, links=links)


classify_drift_batches = classify_drift.batches


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
    parent, shared = links["parent"][rows], links["lcp"][rows]
    found = {name: line[rows] for name, line in found.items()}
    nowhere = found["resync_length"] < 0

    def where(name: str) -> pa.Array:
        return pa.array(found[name].astype(np.int32), mask=nowhere)

    return turn_lines(
        DRIFT,
        calls,
        rows,
        calls.turn_index[parent],
        shared,
        calls.path_len[parent] - shared,
        codes(found["region"], REGIONS),
        where("resync_path"),
        where("resync_prompt"),
        where("resync_length"),
        found["tokens_after_drift"],
        codes(found["cause"], CAUSES),
    )


def turn_lines(
    schema: pa.Schema,
    calls: Sessions,
    which: Longs | Sequence[int],
    *columns: Sequence[Any] | npt.NDArray[Any] | pa.Array,
) -> pa.Table:
    """A table of the session and turn of some calls, and further columns.

    ``schema`` begins with session_id and turn_index; ``which`` are indices of calls;
    the columns that follow are given as their types or as `codes`.
    """
    rows = pa.array(np.asarray(which, np.int64))
    taken = calls.table.select(["session_id", "turn_index"]).take(rows)
    arrays = []
    for field, values in zip(list(schema)[2:], columns, strict=True):
        if isinstance(values, np.ndarray):  # numpy casts faster than Arrow
            values = values.astype(field.type.to_pandas_dtype(), copy=False)
        known = isinstance(values, pa.Array)
        arrays.append(values if known else pa.array(values, field.type))
    return pa.Table.from_arrays([*taken.columns, *arrays], schema=schema)


def codes(values: Sequence[int] | npt.NDArray[Any], names: tuple[str, ...]) -> pa.Array:
    """Names by their number, with all of the names as categories."""
    numbers = pa.array(np.asarray(values, np.int8))
    return pa.DictionaryArray.from_arrays(numbers, pa.array(names))


@stage
def explain_drift(
    turns: TableLike, links: Source, tokenizer: Tokenizer, *, min_run: int = MIN_RUN
) -> pa.Table:
    """Explain every span where a prompt departs from its parent's path.

    Parameters
    ----------
    turns, links : table
        As for `trajkit.classify_drift`.
    tokenizer : Tokenizer
        The engine's tokenizer, as `check_roundtrip` takes it.
    min_run : int
        Tokens that both sides have in common between two findings. A span that no cause
        explains is split at shorter common runs if that explains every part.

    Returns
    -------
    Table
        `trajkit.schema.FINDINGS`: one or more rows per turn whose prompt does not begin
        with its parent's path. `trajkit.schema.TEXT_CAUSES` defines the causes. Tokens
        that the prompt adds after the path are not findings.

    Raises
    ------
    SchemaError, InvalidTurnsError, ArgumentError
        As `trajkit.classify_drift`.

    Notes
    -----
    After drift, the sides are aligned at the nearest common run, in linear time. A
    special token that only one side skips counts as 64 tokens of distance. JSON is
    searched in messages of up to 16,384 tokens.
    """
    min_run = chosen_int("min_run", min_run, 1)
    codec = Codec(tokenizer)

    def one(turns: pa.Table, links: pa.Table) -> pa.Table:
        calls, forest, records = read_linked(turns, links)
        found = list(find_causes(calls, forest, records, codec, min_run))
        which = [one.call for one in found]
        return turn_lines(
            FINDINGS,
            calls,
            which,
            calls.turn_index[records["parent"][which]],
            [one.number for one in found],
            codes([TEXT_CAUSES.index(one.cause) for one in found], TEXT_CAUSES),
            *([one.stretch[i] for one in found] for i in range(4)),
            [one.path_text for one in found],
            [one.prompt_text for one in found],
        )

    return apply(one, turns, table_of=as_turns, links=links)


explain_drift_batches = explain_drift.batches


class Finding(NamedTuple):
    """One span of drift of one call."""

    call: int
    number: int
    cause: str
    stretch: Stretch
    path_text: str
    prompt_text: str


def find_causes(
    calls: Sessions, forest: Forest, links: Records, codec: Codec, min_run: int
) -> Iterator[Finding]:
    """The findings of every call, in order. ``links`` must have their ``lcp``."""
    for s in range(len(calls)):
        lo, hi = calls.offsets[s : s + 2].tolist()
        session = SessionCalls(calls.part(s, s + 1))
        for call in range(lo, hi):
            parent, shared = links["parent"][call].item(), links["lcp"][call].item()
            if parent < 0 or shared == calls.path_len[parent]:
                continue
            held = Side(codec, calls.path(parent))
            prompt = Side(codec, calls.prompt(call))
            other = other_text_cause(session, parent - lo, call - lo)
            causes = _explained(held, prompt, shared, min_run, other)
            for number, (cause, stretch) in enumerate(causes):
                texts = held.text(*stretch[:2]), prompt.text(*stretch[2:])
                yield Finding(call, number, cause, stretch, *texts)


def other_text_cause(calls: SessionCalls, parent: int, call: int) -> str:
    """The cause of different text that nothing else explains, from the messages."""
    before, now = calls.messages(parent), calls.messages(call)
    if before is None or now is None:
        return "other_text"
    reply = calls.table.column("response")[parent].as_py()
    shown = before.keys + (reply["key"] if reply else b"")
    if not now.keys.startswith(shown):
        return "rewritten"
    # Without a recorded reply, nothing shows whether it came back unchanged.
    return "template" if reply else "other_text"


def _explained(
    held: Side, prompt: Side, lcp: int, min_run: int, other: str
) -> Iterator[tuple[str, Stretch]]:
    n_held, n_prompt = len(held.ids), len(prompt.ids)
    after_lcp = Stretch(lcp, n_held, lcp, n_prompt)
    for stretch in _differences(held, prompt, after_lcp, min_run):
        cause = text_cause(held, prompt, stretch)
        runs = _CLOSER_RUNS if cause is None else _COARSE.get(cause, ())
        pieces = _closer(held, prompt, stretch, [run for run in runs if run < min_run])
        if any(one != cause for one, _ in pieces):
            yield from pieces
        else:
            yield cause or other, stretch


def _closer(
    held: Side, prompt: Side, stretch: Stretch, runs: list[int]
) -> list[tuple[str, Stretch]]:
    """The parts of a span if each has its own cause, else an empty list."""
    if stretch.path_start == stretch.path_stop:
        return []
    for run in runs:
        pieces = _differences(held, prompt, stretch, run)
        # Tokens that the prompt has after the end of the path's span differ as well.
        last = pieces[-1]
        after = last.prompt_stop + stretch.path_stop - last.path_stop
        if after < stretch.prompt_stop:
            end = stretch.path_stop
            pieces.append(Stretch(end, end, after, stretch.prompt_stop))
        if not 1 < len(pieces) <= _MOST_PIECES:
            continue
        explained = []
        for piece in pieces:
            cause = text_cause(held, prompt, piece)
            if cause is None:
                break
            explained.append((cause, piece))
        else:
            return explained
    return []


def _differences(held: Side, prompt: Side, stretch: Stretch, run: int) -> list[Stretch]:
    """The spans between common runs where the two sides differ."""
    start, stop, prompt_start, prompt_stop = stretch
    out = np.empty((stop - start + 1, len(Stretch._fields)), np.int64)
    n_found = _core.align(
        held.ids[start:stop],
        prompt.ids[prompt_start:prompt_stop],
        held.borders[start : stop + 1],
        prompt.borders[prompt_start : prompt_stop + 1],
        run,
        out,
    )
    found = out[:n_found] + np.array([start, start, prompt_start, prompt_start])
    return [Stretch(*line) for line in found.tolist()]


@stage
def check_roundtrip(turns: TableLike, tokenizer: Tokenizer) -> pa.Table:
    """Check for each turn whether encoding its decoded output gives the same ids.

    If it does not, a client that keeps text cannot return the reply as it was sampled.
    The turns stay unchanged. To mask such turns, replace their ``trainable`` column by
    the result's (see the notes).

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    tokenizer : Tokenizer
        The engine's tokenizer: any object with ``encode(text,
        add_special_tokens=False)`` and ``decode(ids, skip_special_tokens=False)``, such
        as those of transformers and ``tokenizers.Tokenizer``.

    Returns
    -------
    Table
        `trajkit.schema.ROUNDTRIP`, one row per turn, in the order of ``turns``.

    Raises
    ------
    SchemaError
        ``tokenizer`` lacks a method; else as `trajkit.linearize`.
    InvalidTurnsError
        As `trajkit.linearize`.

    Notes
    -----
    To train only outputs with an exact round trip::

        checked = tk.analysis.check_roundtrip(turns, tokenizer)
        at = turns.schema.get_field_index("trainable")
        turns = turns.set_column(at, turns.field(at), checked["trainable"])

    References
    ----------
    slime's first coding agent masked such turns; an empty output passes (slime's
    https://github.com/THUDM/slime/blob/b6764131d/examples/coding_agent_rl/middleware.py).
    """
    codec = Codec(tokenizer)

    def one(turns: pa.Table) -> pa.Table:
        calls = Sessions.of(turns)
        n_calls = len(calls.calls)
        differs = np.full(n_calls, -1, np.int32)
        n_encoded = np.empty(n_calls, np.int32)
        for call in range(n_calls):
            output = calls.output(call)
            again = codec.ids(codec.text(output)) if len(output) else output
            n_encoded[call] = len(again)
            same = lcp(output, again)
            if same < max(len(output), len(again)):
                differs[call] = same
        exact = differs < 0
        return turn_lines(
            ROUNDTRIP,
            calls,
            range(n_calls),
            exact,
            pa.array(differs, mask=exact),
            calls.calls["out_len"],
            n_encoded,
            exact & calls.calls["trainable"].astype(np.bool_),
        )

    return apply(one, turns, table_of=as_turns)


check_roundtrip_batches = check_roundtrip.batches
