"""Training on observations: a weight per token in addition to the loss mask.

A token that a tool's output or another message renders has a weight if the model learns to
predict it, once per rollout however many rows show it.
"""

from __future__ import annotations  # a signature shows the words below

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.learn._checks import check_number
from trajkit.schema import OBSERVATIONS, ROWS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical, place
from trajkit.tables.ragged import Longs, offsets_of
from trajkit.tables.reshape import with_column
from trajkit.tables.session_batches import whole_sessions
from trajkit.tables.stages import (
    Batches,
    Source,
    batches_in,
    batches_of,
    in_step,
    unknown,
)
from trajkit.turns.attribution import Ints, Messages, Rendered, SessionCalls, ToolCalls
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import errored, session_facts
from trajkit.turns.sessions import Sessions

Names: TypeAlias = Collection[str] | Mapping[str, float]
"""Names with a common alpha, or a mapping with an alpha for each."""

Missing: TypeAlias = Literal["raise", "skip"]
Normalization: TypeAlias = Literal["flat", "ratio"]
Weights: TypeAlias = npt.NDArray[np.float32]

_ALL = np.iinfo(np.int64).max


class _Options(TypedDict, total=False):
    roles: Names | None
    tool_names: Names | None
    alpha: float
    normalization: Normalization
    missing: Missing
    sessions: TableLike | None


class _Selection:
    def __init__(
        self,
        roles: Names | None = None,
        tool_names: Names | None = None,
        alpha: float = 1.0,
        normalization: Normalization = "flat",
        missing: Missing = "raise",
        sessions: TableLike | None = None,
    ) -> None:
        check_choice("normalization", normalization, Normalization)
        check_choice("missing", missing, Missing)
        check_number("alpha", alpha, 0)
        # alpha of each role and tool that is selected; None: every tool, at its role's
        self.roles = (
            {"tool": alpha} if roles is None else _alphas("roles", roles, alpha)
        )
        self.tools: dict[str, float] | None = None
        if tool_names is not None:
            if "tool" not in self.roles:
                raise ArgumentError(
                    f"tool_names={tool_names!r}: roles {sorted(self.roles)} select no tool"
                )
            self.tools = _alphas("tool_names", tool_names, self.roles["tool"])
        self.by_ratio, self.skips = normalization == "ratio", missing == "skip"
        self.facts = session_facts(None, sessions)

    def of_tool(self, name: str | None) -> float | None:
        """The alpha of a tool; None: it is not selected."""
        if self.tools is None:
            return self.roles.get("tool")
        return None if name is None else self.tools.get(name)


def _alphas(what: str, names: Names, alpha: float) -> dict[str, float]:
    several = isinstance(names, Iterable) and not isinstance(names, str)
    if not several or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{what}={names!r}: expected several names, or a mapping")
    if not names:
        raise ArgumentError(f"{what} is empty: it would select nothing")
    if not isinstance(names, Mapping):
        return dict.fromkeys(names, alpha)
    for name, value in names.items():
        check_number(f"{what}[{name!r}]", value, 0)
    return dict(names)


def observation_weights(
    rows: TableLike,
    turns: TableLike,
    *,
    roles: Names | None = None,
    tool_names: Names | None = None,
    alpha: float = 1.0,
    normalization: Normalization = "flat",
    missing: Missing = "raise",
    sessions: TableLike | None = None,
) -> pa.Table:
    """Add a weight for every observed token that is learned.

    The loss mask does not change. A token has a weight if

    - it is content of a message of a selected role or tool,
    - an assistant message precedes it, after the request that began its conversation
      (decided by messages or, without messages, by the prompt of that request; drift in
      the reply does not matter),
    - no model sampled it, and
    - no earlier row of the session gives it a weight.

    A message is recognized in other rows by its key, its number among equal messages of
    the request, and its tool_call_id or, without one, the reply that it follows. Without
    messages, it is recognized by tool name, content ids and number.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`, made of these turns, with all rows of each session that
        occurs.
    turns : table
        `trajkit.schema.TURNS` in full or delta form, with the columns
        `trajkit.schema.ATTRIBUTION`.
    roles : names, or mapping of name to alpha, optional
        Roles whose messages get a weight. None: ``("tool",)``. Without messages in
        ``turns``, only tools are known, by their names.
    tool_names : names, or mapping of name to alpha, optional
        Tools whose messages get a weight. None: all, including those without a name.
    alpha : float, at least 0
        The weight of names without their own in ``tool_names`` or, next, ``roles``.
    normalization : {"flat", "ratio"}
        "ratio" multiplies alpha by ``R / S``: S is the number of observed tokens of the
        rollout and R that of its trained tokens, before ``max_row_tokens`` cut the rows.
    missing : {"raise", "skip"}
        How to treat turns whose attribution columns are missing or incomplete. "skip":
        the turn attributes nothing and is counted; other turns may attribute its prefix.
    sessions : table, optional
        `trajkit.schema.SESSIONS`: a rollout with an error gets no weights.

    Returns
    -------
    Table
        The rows with the column ``observation_weight`` (large_list<float32>), as long
        as ``input_ids``; 0 for tokens that are not learned. `observation_report` has
        the counts.

    Raises
    ------
    ArgumentError
        A choice does not exist, or a list of names is empty.
    InvalidTurnsError
        ``missing="raise"`` and a turn lacks attribution; or a row does not belong to
        these turns.
    """
    selection = _Selection(roles, tool_names, alpha, normalization, missing, sessions)
    return _observed(as_turns(turns), as_table(rows), selection)[0]


def observation_report(
    rows: TableLike, turns: TableLike, **options: Unpack[_Options]
) -> pa.Table:
    """The counts of observed, repeated and missing tokens of `observation_weights`.

    Parameters
    ----------
    rows, turns, **options
        As for `observation_weights`.

    Returns
    -------
    Table
        `trajkit.schema.OBSERVATIONS`, one row per session of ``turns``.
    """
    return _observed(as_turns(turns), as_table(rows), _Selection(**options))[1]


def observation_weights_batches(
    rows: Source,
    turns: Source,
    *,
    report: list[pa.RecordBatch] | None = None,
    **options: Unpack[_Options],
) -> Batches:
    """From record batches to an iterator of them; see `observation_weights`.

    Both have their sessions in one order. The batches of `observation_report` are
    appended to ``report`` while the rows are read.
    """
    selection = _Selection(**options)

    def made() -> Iterator[pa.Table]:
        lead = whole_sessions(batches_of(turns))
        for own, theirs in in_step(lead, batches_of(rows), "turns", "rows"):
            if own is None:
                raise unknown(theirs, "rows", "turns")
            table, counts = _observed(own, theirs, selection)
            if report is not None:
                report.extend(counts.to_batches())
            yield table

    return batches_in(made())


def _observed(
    turns: pa.Table, rows: pa.Table, selection: _Selection
) -> tuple[pa.Table, pa.Table]:
    calls, table = Sessions.of(turns), canonical(rows, ROWS)
    failed = errored(selection.facts.of(calls.ids))
    by_session = _rows_of(table, calls.ids)
    weights: list[Weights] = [
        np.zeros(len(ids), np.float32) for ids in table["input_ids"]
    ]
    lines = []
    for s, name in enumerate(calls.ids.to_pylist()):
        count = dict.fromkeys(OBSERVATIONS.names, 0) | {"session_id": name}
        lines.append(count)
        if s in by_session and not failed[s]:
            session = SessionCalls(calls.part(s, s + 1))
            _echo(session, by_session[s], selection, name, count, weights)
    column = pa.LargeListArray.from_arrays(
        pa.array(offsets_of([*map(len, weights)])),
        pa.array(np.concatenate([*weights, np.zeros(0, np.float32)])),
    )
    table = with_column(table, "observation_weight", column)
    return table, pa.Table.from_pylist(lines, OBSERVATIONS)


@dataclass(frozen=True, slots=True)
class _Row:
    # its number in the table
    number: int
    ids: Ints
    # of its spans
    start: Ints
    stop: Ints
    last_turn: int
    # tokens that the row trains, or would train if it were not cut
    trained: int
    where: str

    def last_call(self, calls: SessionCalls) -> int:
        """The call whose path is the row, or begins with it."""
        for call in range(
            np.searchsorted(calls.turn_index, self.last_turn), len(calls)
        ):
            if begins(calls.path(call), self.ids):
                return call
        raise InvalidTurnsError(
            f"{self.where}: no call of the session has its {len(self.ids)} tokens, so what "
            "they render is unknown"
        )


def _rows_of(table: pa.Table, session_ids: pa.Array) -> dict[int, list[_Row]]:
    found = pc.index_in(table.column("session_id"), session_ids)
    if found.null_count:
        row = int(np.flatnonzero(np.asarray(found.is_null()))[0])
        raise InvalidTurnsError(f"{place(table, row)}: the session has no turns")
    by_session: dict[int, list[_Row]] = {}
    for number, session in enumerate(found.to_pylist()):
        spans = table.column("spans")[number].values
        start, stop, turn, out_start, out_stop = (
            np.asarray(pc.struct_field(spans, name))
            for name in ("start", "stop", "turn_index", "output_start", "output_stop")
        )
        kinds = pc.struct_field(spans, "kind").cast(pa.string())
        trained = np.asarray(pc.is_in(kinds, pa.array(["trained", "cut"])))
        by_session.setdefault(session, []).append(
            _Row(
                number=number,
                ids=table.column("input_ids")[number].values.to_numpy(),
                start=start,
                stop=stop,
                last_turn=int(turn.max(initial=-1)),
                trained=int((out_stop - out_start)[trained].sum()),
                where=place(table, number),
            )
        )
    return by_session


def begins(ids: Ints, prefix: Ints) -> bool:
    """Whether the ids begin with the prefix."""
    return np.array_equal(ids[: len(prefix)], prefix)


def _echo(
    calls: SessionCalls,
    rows: list[_Row],
    selection: _Selection,
    name: str,
    count: dict[str, Any],
    weights: list[Weights],
) -> None:
    labels = _Labels(calls, selection, f"session {name!r}")
    count["turns_skipped"] = labels.skipped
    # by label: its number of tokens in the first row that has it, and how many leading
    # tokens of them an earlier row contains
    sizes, covered = np.zeros((2, 0), np.int64)
    for row in rows:
        full = labels.of(row.last_call(calls)).copy()
        n, n_labels = len(row.ids), len(labels.alphas)
        for start, stop in zip(row.start, row.stop, strict=True):
            full[start:stop] = -1
        tokens = np.flatnonzero(full >= 0)
        label, inside = full[tokens], tokens < n
        sizes, covered = (
            np.pad(each, (0, n_labels - len(each))) for each in (sizes, covered)
        )
        in_path = np.bincount(label, minlength=n_labels)
        seen = np.bincount(label[inside], minlength=n_labels)
        sizes = np.where(sizes == 0, in_path, sizes)
        again = _ranks(label, in_path) < covered[label]
        taken = inside & ~again
        weights[row.number][tokens[taken]] = np.array(labels.alphas)[label[taken]]
        count["tokens_observed"] += int(taken.sum())
        count["tokens_repeated"] += int((inside & again).sum())
        complete = (in_path > 0) & (seen == in_path)
        covered = np.where(complete, _ALL, np.maximum(covered, seen))
    count["messages_unnamed"] = len(labels.unnamed)
    if selection.by_ratio and sizes.any():
        scale = np.float32(sum(row.trained for row in rows) / sizes.sum())
        for row in rows:
            weights[row.number] *= scale


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

    def __init__(self, calls: SessionCalls, selection: _Selection, where: str) -> None:
        self.calls, self.selection = calls, selection
        # by label
        self.alphas: list[float] = []
        self.unnamed: set[tuple[bytes, int]] = set()
        self.skipped = 0
        self._tools = ToolCalls(calls)
        # the label of each prompt token, -1: no weight; and, without messages, how often
        # each text occurs
        self._by_call: dict[int, tuple[Ints, Counter[bytes]]] = {}
        self._numbers: dict[tuple[bytes, int, bytes], int] = {}
        self._first: dict[tuple[bytes, int], int] = {}
        self._rendered: list[Rendered | None] = []
        for call in range(len(calls)):
            fault, flags = calls.gaps(call)
            if (fault or flags) and not selection.skips:
                turn = calls.turn_index[call]
                raise InvalidTurnsError(f"{where}, turn {turn}: {fault or flags}")
            self.skipped += bool(fault or flags)
            self._rendered.append(None if fault or flags else calls.rendered(call))

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
        return self._by_call[call][0]

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

    def _label(self, call: int, before: int | None) -> tuple[Ints, Counter[bytes]]:
        labels = np.full(int(self.calls.n_prompt[call]), -1, np.int32)
        texts: Counter[bytes] = Counter()
        if before is not None:
            inherited, known = self._by_call[before]
            labels[: len(inherited)] = inherited
            texts = known.copy()
        rendered = self._rendered[call]
        if rendered is None:
            return labels, texts
        tokens = np.flatnonzero((rendered.message >= 0) & rendered.is_content)
        message = rendered.message[tokens]
        shown = np.flatnonzero(np.bincount(message)).tolist()
        of_message = np.full(max(shown, default=-1) + 1, -1, np.int32)
        messages = self.calls.messages(call)
        if messages is not None:
            after = self._model_turn(call, messages)
            counts = Counter[bytes]()
            for i in range(len(messages)):
                key, at = messages.key(i), i - rendered.first
                if at in shown and i > after:
                    name = rendered.names[at] if rendered.names is not None else None
                    of_message[at] = self._message(messages, i, counts[key], name)
                counts[key] += 1
        else:
            ids, names = self.calls.prompt(call)[tokens], rendered.names or []
            for at in shown:
                name, text = names[at], name_digest(names[at], ids[message == at])
                alpha = None if name is None else self.selection.of_tool(name)
                if alpha is not None:
                    of_message[at] = self._number((text, texts[text], b""), alpha)
                texts[text] += 1
        labels[tokens] = of_message[message]
        if messages is None and shown:
            labels[: self._first_prompt(call)] = -1
        return labels, texts

    def _message(
        self, messages: Messages, i: int, number: int, name: str | None
    ) -> int:
        """The label of message i of a request, -1 if it is not selected."""
        key, role = messages.key(i), messages.roles[i]
        alpha, call_id = self.selection.roles.get(role), None
        if role == "tool" and alpha is not None:
            answered = self._tools.answered(messages, i)
            call_id, name = answered.call_id, name or answered.name
            alpha = self.selection.of_tool(name)
            if alpha is None and name is None:
                self.unnamed.add((key, number))
        if alpha is None:
            return -1
        if call_id is not None:
            return self._number((key, number, b""), alpha)
        replies = (k for k in range(i - 1, -1, -1) if messages.roles[k] == "assistant")
        reply = next(map(messages.key, replies), b"")
        if reply not in self.calls.replies and (key, number) in self._first:
            # the reply before it was rewritten, so this is the earlier observation
            return self._first[key, number]
        label = self._number((key, number, reply), alpha)
        self._first.setdefault((key, number), label)
        return label

    def _number(self, identity: tuple[bytes, int, bytes], alpha: float) -> int:
        label = self._numbers.setdefault(identity, len(self.alphas))
        if label == len(self.alphas):
            self.alphas.append(alpha)
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

    def _first_prompt(self, call: int) -> int:
        """Prompt tokens before any reply, if there are no messages."""
        prompt = self.calls.prompt(call)
        for earlier in range(call):
            asked = self.calls.prompt(earlier)
            if 0 < len(asked) < len(prompt) and begins(prompt, asked):
                return len(asked)
        return len(prompt)


def name_digest(name: str | None, ids: Ints) -> bytes:
    """16 bytes that identify a text of a tool."""
    digest = blake2b(ids.tobytes(), digest_size=16)
    digest.update(b"\0" + (name or "").encode())
    return digest.digest()
