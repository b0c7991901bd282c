"""Converts a session's turns to delta form, one by one as they are recorded.

The base of a turn is the session's earlier turn whose prompt and output share the
longest prefix with its prompt (`trajkit.compact`).
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trajkit import Recorder
from trajkit_shim.prompting.reply_matching import START, next_position

if TYPE_CHECKING:
    from trajkit_shim.sessions.turn_log import LoggedTurn


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
        # for each turn in the recorder its turn index, and the position after its
        # messages and its reply
        self._turns: list[tuple[int, bytes]] = []
        # a tree of message lists: by position the one before it, and its length
        self._nodes = {START: (START, 0)}

    def add(self, turn: "LoggedTurn", turn_index: int, shown: Set[bytes]) -> Delta:
        """Add a turn, and return what it shares with an earlier one.

        ``shown``: keys of the messages that are written without their bodies. Only these
        can be shared.
        """
        recorded = self._recorder.record(
            "", prompt_ids=turn.prompt_ids, output_ids=turn.output_ids
        )
        path = [START, *turn.positions]
        if turn.response is not None:
            path.append(next_position(path[-1], turn.response.key))
        delta = Delta()
        if recorded.base_turn is not None:
            base, position = self._turns[recorded.base_turn]
            before, depth = self._nodes[position]
            while depth >= len(path) or path[depth] != position:
                position = before
                before, depth = self._nodes[position]
            n_bare = turn.n_logged
            while n_bare < len(turn.messages) and turn.messages[n_bare].key in shown:
                n_bare += 1
            delta = Delta(base, recorded.shared_length, min(depth, n_bare))
        for depth in range(len(path) - 1, 0, -1):
            if path[depth] in self._nodes:
                # so are all before it
                break
            self._nodes[path[depth]] = path[depth - 1], depth
        self._turns.append((turn_index, path[-1]))
        return delta
