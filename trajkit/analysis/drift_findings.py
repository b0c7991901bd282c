"""Explain drift by the texts of both sides: the ``findings`` table."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit.analysis.drift_text import Side, Stretch, text_cause
from trajkit.analysis.tokenizer import Codec, Tokenizer
from trajkit.analysis.turn_lines import codes, turn_lines
from trajkit.rows.links import read_linked
from trajkit.schema import FINDINGS, TEXT_CAUSES
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Records
from trajkit.tables.stages import Source, apply, stage
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions

MIN_RUN = 8
"""Contiguous tokens that path and prompt must have in common to agree again."""

# Shorter common runs that may split an unexplained span, and the most parts it may have.
_CLOSER_RUNS = (4, 2, 1)
_MOST_PIECES = 64
# Causes that may hide others. Dropped text is not split at short runs, which are chance.
_COARSE = {"white_space": _CLOSER_RUNS, "reasoning_dropped": _CLOSER_RUNS[:1]}


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
        The engine's tokenizer, as `trajkit.analysis.check_roundtrip` takes it.
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
        return _findings(turns, links, codec, min_run)

    return apply(one, turns, table_of=as_turns, links=links)


explain_drift_batches = explain_drift.batches


def _findings(turns: pa.Table, links: pa.Table, codec: Codec, min_run: int) -> pa.Table:
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


@dataclass(frozen=True, slots=True)
class Finding:
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
            parent, lcp = links["parent"][call].item(), links["lcp"][call].item()
            if parent < 0 or lcp == calls.path_len[parent]:
                continue
            held, prompt = (
                Side(codec, ids) for ids in (calls.path(parent), calls.prompt(call))
            )
            other = other_text_cause(session, parent - lo, call - lo)
            causes = _explained(held, prompt, lcp, min_run, other)
            for number, (cause, stretch) in enumerate(causes):
                yield Finding(
                    call,
                    number,
                    cause,
                    stretch,
                    held.text(stretch.path_start, stretch.path_stop),
                    prompt.text(stretch.prompt_start, stretch.prompt_stop),
                )


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
