"""Converts a session's turns to delta form, one by one as they are recorded.

The base of a turn is the session's earlier turn whose prompt and output share the
longest prefix with its prompt (`trajkit.compact`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajkit import Recorder
from trajkit_shim.prompting.reply_matching import START


@dataclass(frozen=True, slots=True)
class Delta:
    """What a turn shares with an earlier one: see `trajkit.schema.DELTA_FIELDS`."""

    base_turn: int | None = None  # None: nothing is shared
    shared_length: int = 0
    shared_messages: int = 0


class DeltaEncoder:
    """The recorded turns of one session."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all turns, so that the next one is written in full."""
        self._recorder = Recorder()
        self._turns: list[int] = []  # the turn index of each turn in the recorder
        # a tree of message lists: the position before each, and its length
        self._nodes: dict[bytes, tuple[bytes, int]] = {}
        # for each turn, the position after its messages and its reply
        self._shown: list[bytes] = []

    def add(
        self,
        turn_index: int,
        prompt_ids: npt.NDArray[np.int32],
        output_ids: npt.NDArray[np.int32],
        positions: Sequence[bytes],
        reply_position: bytes | None,
        n_bare: int,
    ) -> Delta:
        """Add a turn, and return what it shares with an earlier one.

        ``positions``: after each message (`reply_matching.next_position`), and
        ``reply_position`` after the reply, if later requests contain it. ``n_bare``:
        number of leading messages written without their bodies. Only these can be
        shared.
        """
        recorded = self._recorder.record(
            "", prompt_ids=prompt_ids, output_ids=output_ids
        )
        base = recorded.base_turn
        delta = Delta()
        if base is not None:
            shared = min(self._common(positions, self._shown[base]), n_bare)
            delta = Delta(self._turns[base], recorded.shared_length, shared)
        depth = len(positions)
        # all before a known one are known
        while depth and positions[depth - 1] not in self._nodes:
            depth -= 1
            before = positions[depth - 1] if depth else START
            self._nodes[positions[depth]] = before, depth + 1
        shown = positions[-1] if positions else START
        if reply_position is not None:
            self._nodes[reply_position] = shown, len(positions) + 1
            shown = reply_position
        self._turns.append(turn_index)
        self._shown.append(shown)
        return delta

    def _common(self, positions: Sequence[bytes], position: bytes) -> int:
        """The length of the common prefix of two message lists, one by its end."""
        while position != START:
            before, depth = self._nodes[position]
            if depth <= len(positions) and positions[depth - 1] == position:
                return depth
            position = before
        return 0
