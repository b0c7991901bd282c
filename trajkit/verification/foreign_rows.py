"""Locate turns in rows of other systems, which have no spans.

First, each turn is searched after its complete prompt. Trained tokens that this does not
explain are then searched anywhere in the row, after the last tokens of a prompt.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trajkit.schema.engine import Bools
from trajkit.tables.ragged import Floats, Ints, Longs
from trajkit.turns.flat_buffers import Spans, TurnTokens
from trajkit.verification import rules
from trajkit.verification.rules import Case

PROMPT_END = 16
"""Tokens of the prompt that must precede an output found out of context."""
TOLERANCE = 1e-2
"""Engines and trainers write logprobs with 32 or 16 bits."""

_ID_BYTES = 4


def check_located(case: Case) -> None:
    """Check rows without spans: every masked token must belong to a turn's output."""
    trained = _located(case)
    rules.mask_and_logprobs(case, trained)
    rules.untrainable(case, trained)
    rules.each_once(case, trained)
    if not case.may_splice:
        in_context = trained.in_context(case.rows.ids, case.turns)
        rules.context(case, trained, np.arange(len(trained)), in_context)


def _located(case: Case) -> Spans:
    """The trained tokens that a turn sampled, as spans that may or may not be trained."""
    rows, turns, offsets = case.rows, case.turns, case.rows.ids.offsets
    sampled = Sampled(turns, case.may_train)
    source = np.full(len(rows.mask), -1)
    for row, (start, stop) in enumerate(pairwise(offsets.tolist())):
        part, all_calls = slice(start, stop), range(len(turns.outputs))
        calls = case.calls_of(row) if case.session[row] >= 0 else all_calls
        logprobs = rows.logprobs[part] if rows.n_logprobs[row] else None
        source[part], _, _ = sampled.find(
            rows.ids[row], calls, rows.mask[part], logprobs
        )
        sampled.train(row, source[part][rows.mask[part] & (source[part] >= 0)])
    at = np.flatnonzero(rows.mask & (source >= 0))
    source, row_of = source[at], rows.ids.owner[at]
    groups = source - at, row_of, turns.outputs.owner[source], sampled.due[source]
    runs = np.array([*rules.consecutive(at, *groups)], np.int64).reshape(-1, 2)
    first, size = runs.T
    owner, call = row_of[first], turns.outputs.owner[source[first]]
    begin = at[first] - offsets[owner]
    output_begin = source[first] - turns.outputs.offsets[call]
    return Spans(
        *(owner, begin, begin + size, call, output_begin, output_begin + size),
        kind=np.full(len(runs), "trained", np.object_),
        index=np.full(len(runs), -1),
        turn_index=turns.calls.turn_index[call].astype(np.int64),
        broken=np.zeros(len(runs), np.bool_),
    )


class _Place(NamedTuple):
    """A range of a row that equals a turn's output."""

    call: int
    start: int
    stop: int
    # it ends with the output, or with the row
    complete: bool
    # it follows the complete prompt
    in_context: bool


class Sampled:
    """Finds sampled tokens in rows, row by row, and knows which were trained."""

    def __init__(self, turns: TurnTokens, due: Bools) -> None:
        self._turns = turns
        # By sampled token, and as the last element for a token that nobody sampled:
        # whether it is expected to be trained, and the row that trains it first.
        self.due = np.append(due, True)
        self.trained_by = np.full(len(self.due), -1)

    def find(
        self,
        ids: Ints,
        calls: Iterable[int],
        mask: Bools,
        logprobs: Floats | None = None,
        *,
        everywhere: bool = False,
    ) -> tuple[Longs, Bools, bool]:
        """Which sampled token each token of a row is, or -1.

        Also whether it follows the prompt that it was sampled after, and whether the row
        has a complete prompt. Outputs after other tokens are searched if trained tokens
        do not follow their prompts, or ``everywhere``.
        """
        turns, places, rest, begins = self._turns, [], [], False
        for call in calls:
            n_prompt, shared = len(turns.prompts[call]), turns.shared(ids, call)
            begins |= 0 < min(n_prompt, len(ids)) <= shared
            if shared > n_prompt:
                complete = shared == min(turns.path_len(call), len(ids))
                places.append(_Place(call, n_prompt, shared, complete, True))
            else:
                rest.append(call)
        source = np.full(len(ids), -1)
        self._assign(places, source, mask, logprobs)
        in_context = source >= 0
        if everywhere or (mask & ~in_context).any():
            places = [one for call in rest for one in _elsewhere(turns, ids, call)]
            self._assign(places, source, mask, logprobs)
        return source, in_context, begins or bool((source >= 0).any())

    def train(self, row: int, source: Longs) -> Longs:
        """Note the sampled tokens that a row trains; the earlier rows that do, or -1."""
        again = self.trained_by[source]
        self.trained_by[source] = np.where(again < 0, row, again)
        return again

    def _assign(
        self, places: list[_Place], source: Longs, mask: Bools, logprobs: Floats | None
    ) -> None:
        turns, placed = self._turns, set()

        def unlikely(place: _Place) -> tuple[float, ...]:
            """Outputs whose logprobs match, complete, due, not yet trained ones first."""
            call, start, stop, complete, _ = place
            n, wrong, first = stop - start, 0.0, int(turns.outputs.offsets[call])
            mine, trained = slice(first, first + n), mask[start:stop]
            if logprobs is not None and trained.any():
                here, due = logprobs[start:stop], turns.logprobs[mine]
                near = np.abs(here - due) <= TOLERANCE * np.maximum(1, np.abs(due))
                good = np.where(turns.has_logprob[mine], near, here == 0)
                wrong = 1 - float(good[trained].mean())
            n_due = int(self.due[mine].sum())
            again = bool((self.trained_by[mine] >= 0).any())
            return wrong, not complete, -n_due, again, -n, n < len(turns.outputs[call])

        for place in sorted(places, key=unlikely) if len(places) > 1 else places:
            here = source[place.start : place.stop]
            free = here < 0
            if place.in_context or (place.call not in placed and free.all()):
                first = turns.outputs.offsets[place.call]
                here[free] = np.arange(first, first + len(here))[free]
                placed.add(place.call)


def _elsewhere(turns: TurnTokens, ids: Ints, call: int) -> Iterator[_Place]:
    """Places in a row of the end of a turn's prompt followed by its output."""
    before, output = turns.prompts[call][-PROMPT_END:], turns.outputs[call]
    wanted, row = np.concatenate([before, output]).tobytes(), ids.tobytes()
    at = row.find(wanted) if len(output) else -1
    while at >= 0:
        if at % _ID_BYTES == 0:
            start = at // _ID_BYTES + len(before)
            yield _Place(call, start, start + len(output), True, False)
        at = row.find(wanted, at + 1)
