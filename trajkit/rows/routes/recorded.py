"""Parents that a source recorded when the requests came in, as NeMo Gym does.

The optional columns `trajkit.schema.ROUTING` of turns have them
(https://github.com/NVIDIA-NeMo/Gym/blob/5385e988f/nemo_gym/token_id_capture/builder.py).
"""

import pyarrow as pa

from trajkit import _core
from trajkit.errors import InvalidTurnsError
from trajkit.rows.routes.links import REASONS, optional_column, sessions_of
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.call_order import by_creation
from trajkit.turns.sessions import Forest, Sessions

RESOLUTIONS = ("root", "resolved", "unresolved")
"""What a source can have recorded of a turn's parent."""


def scored_turns(calls: Sessions) -> dict[int, int]:
    """The call whose reply was scored, by the first call of its session.

    Raises InvalidTurnsError if a session has two.
    """
    scored: dict[int, int] = {}
    values = optional_column(calls, "scored", pa.bool_())
    for session in sessions_of(calls) if values else ():
        for call in session:
            if values[call]:
                before = scored.setdefault(session.start, call)
                if before != call:
                    raise InvalidTurnsError(
                        f"{calls.place(call)}: scored is true, as of turn "
                        f"{calls.turn_index[before]}: expected one turn of a session"
                    )
    return scored


def created_ranks(calls: Sessions, links: Records) -> Ints:
    """The rank of each call by its creation; the root of a scored turn's chain is first."""
    ranks = by_creation(calls)
    for call in scored_turns(calls).values():
        if links["order"][call] >= 0:
            while links["parent"][call] >= 0:
                call = links["parent"][call]
            ranks[call] = -1
    return ranks


class RecordedParents:
    """The recorded parents of the calls; ``links`` has those that begin their prompts."""

    def __init__(self, calls: Sessions, forest: Forest, links: Records) -> None:
        self._calls, self._paths = calls, forest.paths
        self._path_len = calls.path_len
        self._resolutions = optional_column(calls, "parent_resolution", pa.string())
        self._parents = optional_column(calls, "parent_request", pa.string())
        self._has_any = bool(self._resolutions or self._parents)
        self._names = (
            optional_column(calls, "request_id", pa.string()) if self._has_any else []
        )
        n_calls = len(calls.calls)
        for values in (self._resolutions, self._parents, self._names):
            values += [None] * (n_calls - len(values))

    def follow(
        self, session: range, ranked: list[int], parents: list[int], reasons: list[int]
    ) -> None:
        """Replace parents and reasons of a session's calls, if it has recorded parents.

        ``ranked`` are the calls with an output, the shortest prompt first. Raises
        InvalidTurnsError for what contradicts itself.
        """
        if not self._has_any or not any(
            self._resolutions[call] is not None or self._parents[call] is not None
            for call in session
        ):
            return
        named = self._by_name(session)
        before: set[int] = set()
        for call in ranked:
            name = self._recorded_name(call)
            parent = -1 if name is None else named.get(name, -1)
            reason = "no_parent"
            if self._resolutions[call] == "root":
                reason = "root"
            elif parent in before:
                shared = _core.shared_length(self._paths, parent, call)
                if shared == self._path_len[parent]:
                    reason = "recorded"
            elif name is not None and reasons[call] == REASONS["tokens"]:
                # the recorded one is missing, and only one path begins the prompt
                parent, reason = parents[call], "tokens"
            parents[call] = parent if reason in ("recorded", "tokens") else -1
            reasons[call] = REASONS[reason]
            before.add(call)

    def _by_name(self, session: range) -> dict[object, int]:
        """The call of each request_id of a session."""
        named: dict[object, int] = {}
        for call in session:
            name = self._names[call]
            if name is not None and named.setdefault(name, call) != call:
                raise InvalidTurnsError(
                    f"{self._calls.place(call)}: request_id {name!r} is that of turn "
                    f"{self._calls.turn_index[named[name]]}, too: a session with "
                    "recorded parents has each once"
                )
        return named

    def _recorded_name(self, call: int) -> object:
        """The request_id of the recorded parent, or None."""
        resolution, name = self._resolutions[call], self._parents[call]
        if resolution is not None and resolution not in RESOLUTIONS:
            rule = f"expected one of {', '.join(RESOLUTIONS)}"
        elif resolution == "resolved" and name is None:
            rule = "parent_request is null: expected the request_id of the parent"
        elif resolution in ("root", "unresolved") and name is not None:
            rule = f"parent_request is {name!r}: expected null"
        else:
            return name
        raise InvalidTurnsError(
            f"{self._calls.place(call)}: parent_resolution is {resolution!r}, {rule}"
        )
