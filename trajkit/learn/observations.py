"""Training on observations: a weight per token in addition to the loss mask.

A token that a tool's output or another message renders has a weight if the model learns to
predict it, once per rollout however many rows show it.
"""

from __future__ import annotations  # a signature shows the words below

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_number
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import OBSERVATIONS, ROWS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical, place
from trajkit.tables.columns import with_column
from trajkit.tables.ragged import Array, Longs, Ragged
from trajkit.turns.attribution import Ints, Messages, SessionCalls
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import errored, session_facts
from trajkit.turns.sessions import Sessions

Weights: TypeAlias = Mapping[str, float]
"""A weight for each name, 0 or more."""

Missing: TypeAlias = Literal["raise", "skip"]


class _Choice(NamedTuple):
    # the weight of each role and tool that is selected; None: every tool, at its role's
    roles: Weights
    tools: Weights | None
    skips: bool
    sessions: TableLike | None


def _chosen(
    roles: Weights | None = None,
    tool_names: Weights | None = None,
    missing: Missing = "raise",
    sessions: TableLike | None = None,
) -> _Choice:
    check_choice("missing", missing, Missing)
    roles = {"tool": 1.0} if roles is None else _checked("roles", roles)
    if tool_names is not None:
        _checked("tool_names", tool_names)
        if "tool" not in roles:
            raise ArgumentError(
                f"tool_names={tool_names!r}: roles {sorted(roles)} select no tool"
            )
    return _Choice(roles, tool_names, missing == "skip", sessions)


def _checked(what: str, weights: Weights) -> Weights:
    named = isinstance(weights, Mapping) and all(isinstance(k, str) for k in weights)
    if not named or not weights:
        raise ArgumentError(
            f"{what}={weights!r}: expected a weight for each name, as in "
            "{'tool': 1.0}"
        )
    for name, value in weights.items():
        check_number(f"{what}[{name!r}]", value, 0)
    return weights


def observation_weights(
    rows: TableLike,
    turns: TableLike,
    *,
    roles: Weights | None = None,
    tool_names: Weights | None = None,
    missing: Missing = "raise",
    sessions: TableLike | None = None,
) -> pa.Table:
    """Add a weight for every observed token that is learned; the loss mask stays.

    A token has a weight if

    - it is content of a message of a selected role or tool,
    - an assistant message precedes it, after the request that began its conversation
      (drift in the reply does not matter),
    - no model sampled it, and
    - no earlier row of the session gives it a weight.

    A message is recognized in other rows by its key, its number among equal messages of
    the request, and its tool_call_id or, without one, the reply that it follows.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`, made of these turns, with all rows of each session.
    turns : table
        `trajkit.schema.TURNS` in full or delta form, with messages and the columns
        `trajkit.schema.ATTRIBUTION`.
    roles : mapping of str to float, optional
        The weight of messages by role. None: ``{"tool": 1.0}``.
    tool_names : mapping of str to float, optional
        The weight of messages of role ``tool`` by tool, in place of the role's. None: all
        tools, also without a name.
    missing : {"raise", "skip"}
        How to treat turns whose messages or attribution columns are missing or
        incomplete. "skip": the turn attributes nothing and is counted.
    sessions : table, optional
        `trajkit.schema.SESSIONS`: a rollout with an error gets no weights.

    Returns
    -------
    Table
        The rows with the column ``observation_weight`` (large_list<float32>), as long
        as ``input_ids``; 0 for tokens that are not learned.

    Raises
    ------
    ArgumentError
        A choice does not exist, or a mapping is empty or has a weight below 0.
    InvalidTurnsError
        ``missing="raise"`` and a turn lacks attribution; or a row does not belong to
        these turns.
    """
    choice = _chosen(roles, tool_names, missing, sessions)
    return _observed(as_turns(turns), as_table(rows), choice)[0]


def observation_report(rows: TableLike, turns: TableLike, **options: Any) -> pa.Table:
    """The counts of observed, repeated and missing tokens of `observation_weights`.

    Returns `trajkit.schema.OBSERVATIONS`, one row per session of ``turns``.

    Parameters
    ----------
    rows, turns, **options
        As for `observation_weights`, and so are the errors.
    """
    return _observed(as_turns(turns), as_table(rows), _chosen(**options))[1]


class _Row(NamedTuple):
    ids: Ints
    weights: Array  # to be filled
    start: Ints  # of its spans
    stop: Ints
    last_turn: int
    where: str


def _observed(
    turns: pa.Table, rows: pa.Table, choice: _Choice
) -> tuple[pa.Table, pa.Table]:
    calls, table = Sessions.of(turns), canonical(rows, ROWS)
    failed = errored(session_facts(None, choice.sessions).of(calls.ids))
    found = pc.index_in(table.column("session_id"), calls.ids)
    for row in np.flatnonzero(np.asarray(found.is_null()))[:1]:
        raise InvalidTurnsError(f"{place(table, int(row))}: the session has no turns")
    ids = Ragged.of(table.column("input_ids"), fill=0)
    weights = Ragged(np.zeros(len(ids.values), np.float32), ids.offsets)
    of_session: dict[int, list[_Row]] = {}
    for row, session in enumerate(found.to_pylist()):
        spans = table.column("spans")[row].values
        start, stop, turn = (
            np.asarray(pc.struct_field(spans, name))
            for name in ("start", "stop", "turn_index")
        )
        last, where = int(turn.max(initial=-1)), place(table, row)
        made = _Row(ids[row], weights[row], start, stop, last, where)
        of_session.setdefault(session, []).append(made)
    lines = []
    for s, name in enumerate(calls.ids.to_pylist()):
        count = dict.fromkeys(OBSERVATIONS.names, 0) | {"session_id": name}
        lines.append(count)
        if s in of_session and not failed[s]:
            session_calls = SessionCalls(calls.part(s, s + 1))
            _echo(session_calls, of_session[s], choice, name, count)
    table = with_column(table, "observation_weight", weights.to_arrow())
    return table, pa.Table.from_pylist(lines, OBSERVATIONS)


def _last_call(row: _Row, calls: SessionCalls) -> int:
    """The call whose path is the row, or begins with it."""
    first = np.searchsorted(calls.turn_index, row.last_turn)
    for call in range(int(first), len(calls)):
        if begins(calls.path(call), row.ids):
            return call
    raise InvalidTurnsError(
        f"{row.where}: no call of the session has its {len(row.ids)} tokens, so what they "
        "render is unknown"
    )


def begins(ids: Ints, prefix: Ints) -> bool:
    """Whether the ids begin with the prefix."""
    return np.array_equal(ids[: len(prefix)], prefix)


def _echo(
    calls: SessionCalls,
    rows: list[_Row],
    choice: _Choice,
    name: str,
    count: dict[str, Any],
) -> None:
    """Weigh the tokens of the rows of one session, and count them."""
    labels = _Labels(calls, choice, f"session {name!r}")
    count["turns_skipped"] = labels.skipped
    # by label: how many of its leading tokens an earlier row contains
    covered = np.zeros(0, np.int64)
    for row in rows:
        full = labels.of(_last_call(row, calls)).copy()
        for start, stop in zip(row.start, row.stop, strict=True):
            full[start:stop] = -1
        tokens = np.flatnonzero(full >= 0)
        label, inside = full[tokens], tokens < len(row.ids)
        n_labels = len(labels.weights)
        covered = np.pad(covered, (0, n_labels - len(covered)))
        in_path = np.bincount(label, minlength=n_labels)
        seen = np.bincount(label[inside], minlength=n_labels)
        again = _ranks(label, in_path) < covered[label]
        taken = inside & ~again
        row.weights[tokens[taken]] = np.array(labels.weights)[label[taken]]
        count["tokens_observed"] += int(taken.sum())
        count["tokens_repeated"] += int((inside & again).sum())
        complete = (in_path > 0) & (seen == in_path)
        everything = np.iinfo(np.int64).max
        covered = np.where(complete, everything, np.maximum(covered, seen))
    count["messages_unnamed"] = len(labels.unnamed)


def _ranks(label: Ints, sizes: Longs) -> Longs:
    """Number of earlier tokens with the same label, by token."""
    order = np.argsort(label, kind="stable")
    ranks = np.empty(len(label), np.int64)
    ranks[order] = np.arange(len(label)) - (np.cumsum(sizes) - sizes)[label[order]]
    return ranks


class _Labels:
    """The observations of one session, numbered in order of first use.

    A call's attribution applies from the first token that it assigns to a message. Earlier
    tokens (a call may render only the tail of a conversation) are attributed by calls
    whose prompts are a prefix of its prompt.
    """

    def __init__(self, calls: SessionCalls, choice: _Choice, where: str) -> None:
        self.calls, self.choice = calls, choice
        # by label
        self.weights: list[float] = []
        self.unnamed: set[tuple[bytes, int]] = set()
        self.skipped = 0
        # the label of each prompt token, -1: no weight
        self._by_call: dict[int, Ints] = {}
        self._numbers: dict[tuple[bytes, int, bytes], int] = {}
        self._first: dict[tuple[bytes, int], int] = {}
        self._rendered = []
        for call in range(len(calls)):
            fault = calls.gap(call)
            if fault is not None and not choice.skips:
                turn = calls.turn_index[call]
                raise InvalidTurnsError(
                    f"{where}, turn {turn}: {fault}. trajkit serve --attribution records "
                    "what is needed, and missing='skip' passes over the turn"
                )
            self.skipped += fault is not None
            self._rendered.append(None if fault is not None else calls.rendered(call))

    def of(self, call: int) -> Ints:
        """The label of each prompt token of a call, shape (n_prompt,)."""
        chain: list[tuple[int, int | None]] = []
        here: int | None = call
        while here is not None and here not in self._by_call:
            before = self._longest_before(here)
            chain.append((here, before))
            here = before
        for here, before in reversed(chain):
            self._by_call[here] = self._label(here, before)
        return self._by_call[call]

    def _longest_before(self, call: int) -> int | None:
        """The earlier call with the longest prompt before the call's own attribution."""
        rendered, prompt = self._rendered[call], self.calls.prompt(call)
        most = len(prompt)
        if rendered is not None and (rendered.message >= 0).any():
            most = int(np.argmax(rendered.message >= 0))
        sizes = self.calls.n_prompt[:call]
        fitting = np.flatnonzero((sizes <= most) & (sizes > 0))
        for earlier in fitting[np.argsort(-sizes[fitting], kind="stable")]:
            if begins(prompt, self.calls.prompt(int(earlier))):
                return int(earlier)
        return None

    def _label(self, call: int, before: int | None) -> Ints:
        labels = np.full(int(self.calls.n_prompt[call]), -1, np.int32)
        if before is not None:
            labels[: len(self._by_call[before])] = self._by_call[before]
        rendered, messages = self._rendered[call], self.calls.messages(call)
        if rendered is None or messages is None:
            return labels
        tokens = np.flatnonzero((rendered.message >= 0) & rendered.is_content)
        message = rendered.message[tokens]
        of_message = np.full(int(message.max(initial=-1)) + 1, -1, np.int32)
        shown = set(message.tolist())
        after = self._model_turn(call, messages)
        counts = Counter[bytes]()
        for i in range(len(messages)):
            key, at = messages.key(i), i - rendered.first
            if at in shown and i > after:
                name = rendered.names[at] if rendered.names is not None else None
                of_message[at] = self._message(messages, i, counts[key], name)
            counts[key] += 1
        labels[tokens] = of_message[message]
        return labels

    def _message(
        self, messages: Messages, i: int, number: int, name: str | None
    ) -> int:
        """The label of message i of a request, -1 if it is not selected."""
        key, role = messages.key(i), messages.roles[i]
        weight, call_id = self.choice.roles.get(role), None
        if role == "tool" and weight is not None:
            call_id, known = self.calls.answered(messages, i)
            name = name or known
            if self.choice.tools is not None:
                weight = None if name is None else self.choice.tools.get(name)
                if name is None:
                    self.unnamed.add((key, number))
        if weight is None:
            return -1
        if call_id is not None:
            return self._number((key, number, b""), weight)
        replies = (k for k in range(i - 1, -1, -1) if messages.roles[k] == "assistant")
        reply = next(map(messages.key, replies), b"")
        if reply not in self.calls.replies and (key, number) in self._first:
            # the reply before it was rewritten, so this is the earlier observation
            return self._first[key, number]
        label = self._number((key, number, reply), weight)
        self._first.setdefault((key, number), label)
        return label

    def _number(self, identity: tuple[bytes, int, bytes], weight: float) -> int:
        label = self._numbers.setdefault(identity, len(self.weights))
        if label == len(self.weights):
            self.weights.append(weight)
        return label

    def _model_turn(self, call: int, messages: Messages) -> int:
        """The first message of a request that a model wrote, or that replaces one.

        It is an assistant message after the request that began the conversation or,
        within that request (after a compaction), one that an earlier call sampled.
        """
        base, start = call, messages
        for earlier in range(call):
            asked = self.calls.messages(earlier)
            if asked is not None and messages.continues(asked):
                base, start = earlier, asked
                break
        for i, role in enumerate(messages.roles):
            if role == "assistant" and (
                i >= len(start) or self.calls.replies.get(messages.key(i), base) < base
            ):
                return i
        return len(messages)
