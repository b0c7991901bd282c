"""Converts a session's turns to delta form, one by one as they are recorded.

The base of a turn is the session's earlier turn whose prompt and output share the
longest prefix with its prompt (`trajkit.compact`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajkit import Recorder


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
        # a tree of message lists, with the empty list as node 0
        self._nodes: dict[tuple[int, bytes, str], int] = {}
        self._parents = [-1]
        self._depths = [0]
        # for each turn, the node of its messages and its reply
        self._shown: list[int] = []

    def add(
        self,
        turn_index: int,
        prompt_ids: npt.NDArray[np.int32],
        output_ids: npt.NDArray[np.int32],
        messages: Sequence[tuple[bytes, str]],
        response: tuple[bytes, str] | None,
        n_bare: int,
    ) -> Delta:
        """Add a turn, and return what it shares with an earlier one.

        ``n_bare``: number of leading messages written without their bodies. Only these
        can be shared.
        """
        recorded = self._recorder.record(
            "", prompt_ids=prompt_ids, output_ids=output_ids
        )
        path = [0]
        for key, role in messages:
            path.append(self._node(path[-1], key, role))
        base = recorded.base_turn
        delta = Delta()
        if base is not None:
            shared = min(self._common(path, self._shown[base]), n_bare)
            delta = Delta(self._turns[base], recorded.shared_length, shared)
        self._turns.append(turn_index)
        replied = path[-1] if response is None else self._node(path[-1], *response)
        self._shown.append(replied)
        return delta

    def _node(self, parent: int, key: bytes, role: str) -> int:
        node = self._nodes.setdefault((parent, key, role), len(self._parents))
        if node == len(self._parents):
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
        return node

    def _common(self, path: list[int], node: int) -> int:
        """The length of the common prefix of a path and the path to a node."""
        while (depth := self._depths[node]) >= len(path) or path[depth] != node:
            node = self._parents[node]
        return depth
