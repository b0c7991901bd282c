"""A session's turns in delta form, one by one as they are recorded.

The base of a turn is the earlier turn of its session whose prompt and output start like
its prompt for longest (`trajkit.compact`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajkit import Recorder


@dataclass(frozen=True, slots=True)
class Delta:
    """What a turn shares with an earlier one: see `trajkit.schema.DELTA_FIELDS`."""

    # None: it shares nothing
    base_turn: int | None = None
    shared_length: int = 0
    shared_messages: int = 0


class DeltaBook:
    """The turns of one session that are in the log."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all turns: the next one is written whole."""
        self._recorder = Recorder()
        # of each turn of the recorder, its index
        self._turns: list[int] = []
        # lists of messages as paths of a tree, node 0 being the empty one
        self._nodes: dict[tuple[int, bytes, str], int] = {}
        self._parents = [-1]
        self._depths = [0]
        # of each turn, the node of its messages and its reply
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
        """Take a turn in, and say what it shares with an earlier one.

        Parameters
        ----------
        turn_index : int
        prompt_ids, output_ids : ndarray of int32
        messages : sequence of (key, role)
        response : (key, role) or None
        n_bare : int
            How many of the first messages are written without their bodies: others are
            not shared.
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
        self._shown.append(
            path[-1] if response is None else self._node(path[-1], *response)
        )
        return delta

    def _node(self, parent: int, key: bytes, role: str) -> int:
        node = self._nodes.setdefault((parent, key, role), len(self._parents))
        if node == len(self._parents):
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
        return node

    def _common(self, path: list[int], node: int) -> int:
        """How many messages a path shares with that to a node."""
        while (depth := self._depths[node]) >= len(path) or path[depth] != node:
            node = self._parents[node]
        return depth
