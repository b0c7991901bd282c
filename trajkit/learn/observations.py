"""Training on observations: a weight per token in addition to the loss mask.

A token that a tool's output or another message renders has a weight if the model learns to
predict it, once per rollout however many rows show it.
"""

from __future__ import annotations  # a signature shows the words below

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.learn._checks import check_number
from trajkit.schema import OBSERVATIONS, ROWS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical, place
from trajkit.tables.session_batches import whole_sessions
from trajkit.tables.stages import (
    Batches,
    Source,
    batches_in,
    batches_of,
    in_step,
    unknown,
)
from trajkit.turns.attribution import (
    Ints,
    Messages,
    Rendered,
    SessionCalls,
    ToolCalls,
)
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import SessionFacts, errored, session_facts
from trajkit.turns.sessions import Sessions

Names: TypeAlias = Collection[str] | Mapping[str, float]
"""Names with a common alpha, or a mapping with an alpha for each."""

Missing: TypeAlias = Literal["raise", "skip", "whole"]
Normalization: TypeAlias = Literal["flat", "ratio"]
Longs: TypeAlias = npt.NDArray[np.int64]
Weights: TypeAlias = npt.NDArray[np.float32]

_ALL = np.iinfo(np.int64).max
# tokens at the end of a prefix that are compared first
_PROBE = 64


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages that get a weight, and their weights."""

    # alpha of each role that is selected
    roles: dict[str, float]
    # alpha of each tool that is selected; None: every tool, at its role's alpha
    tools: dict[str, float] | None
    normalization: Normalization
    missing: Missing


@dataclass(slots=True)
class Observed:
    """The counts of one session, as in `trajkit.schema.OBSERVATIONS`."""

    tokens_observed: int = 0
    tokens_repeated: int = 0
    messages_unnamed: int = 0
    turns_skipped: int = 0
    turns_whole: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a session."""

    # its number in the table
    number: int
    ids: Ints
    # start, stop, turn_index, output_start and output_stop of its spans
    spans: tuple[Ints, Ints, Ints, Ints, Ints]
    # tokens that the row trains, or would train if it were not cut
    trained: int
    where: str

    def last_call(self, calls: SessionCalls) -> int:
        """The call whose path is the row, or begins with it."""
        turns = self.spans[2]
        first = int(np.searchsorted(calls.turn_index, turns.max(initial=-1)))
        for call in range(first, len(calls)):
            if self._begins(calls, call):
                return call
        raise InvalidTurnsError(
            f"{self.where}: no call of the session has its {len(self.ids)} tokens, so what "
            "they render is unknown"
        )

    def _begins(self, calls: SessionCalls, call: int) -> bool:
        n = len(self.ids)
        if n > calls.path_len[call]:
            return False
        prompt = calls.prompt(call)
        k = min(n, len(prompt))
        return begins(prompt, self.ids[:k]) and np.array_equal(
            calls.output(call)[: n - k], self.ids[k:]
        )


def begins(ids: Ints, prefix: Ints) -> bool:
    """Whether the ids begin with the prefix."""
    n = len(prefix)
    probe = max(n - _PROBE, 0)
    return (
        n <= len(ids)
        and np.array_equal(ids[probe:n], prefix[probe:])
        and np.array_equal(ids[:probe], prefix[:probe])
    )


def _observed_rows(
    table: pa.Table, session_ids: pa.Array
) -> tuple[dict[int, list[_Row]], Longs]:
    """The rows of each session, by its number, and the offsets of the rows' tokens."""
    found = pc.index_in(table.column("session_id"), session_ids)
    if found.null_count:
        row = int(np.flatnonzero(np.asarray(found.is_null()))[0])
        raise InvalidTurnsError(f"{place(table, row)}: the session has no turns")
    by_session: dict[int, list[_Row]] = {}
    sizes = [0]
    for number, session in enumerate(np.asarray(found)):
        ids = table.column("input_ids")[number].values.to_numpy()
        spans = table.column("spans")[number].values
        start, stop, turn, out_start, out_stop = (
            np.asarray(pc.struct_field(spans, name))
            for name in ("start", "stop", "turn_index", "output_start", "output_stop")
        )
        kinds = pc.struct_field(spans, "kind").cast(pa.string())
        trained = np.asarray(pc.is_in(kinds, pa.array(["trained", "cut"])))
        by_session.setdefault(int(session), []).append(
            _Row(
                number,
                ids,
                (start, stop, turn, out_start, out_stop),
                int((out_stop - out_start)[trained].sum()),
                place(table, number),
            )
        )
        sizes.append(len(ids))
    return by_session, np.cumsum(sizes)


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
    missing : {"raise", "skip", "whole"}
        How to treat turns whose attribution columns are missing or incomplete. "skip":
        the turn attributes nothing and is counted; other turns may attribute its prefix.
        "whole": if only the content flags are missing, a message's template scaffold gets
        a weight as well; otherwise as "skip".
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
    selection, facts = _selection(
        roles, tool_names, alpha, normalization, missing, sessions
    )
    return _observed(as_turns(turns), as_table(rows), selection, facts)[0]


class _Options(TypedDict, total=False):
    roles: Names | None
    tool_names: Names | None
    alpha: float
    normalization: Normalization
    missing: Missing
    sessions: TableLike | None


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
    selection, facts = _selection(**options)
    return _observed(as_turns(turns), as_table(rows), selection, facts)[1]


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
    selection, facts = _selection(**options)

    def made() -> Iterator[pa.Table]:
        lead = whole_sessions(batches_of(turns))
        for own, theirs in in_step(lead, batches_of(rows), "turns", "rows"):
            if own is None:
                raise unknown(theirs, "rows", "turns")
            table, counts = _observed(own, theirs, selection, facts)
            if report is not None:
                report.extend(counts.to_batches())
            yield table

    return batches_in(made())


def _observed(
    turns: pa.Table,
    rows: pa.Table,
    selection: Selection,
    facts: SessionFacts,
) -> tuple[pa.Table, pa.Table]:
    """The rows with their weights, and the report."""
    calls = Sessions.of(turns)
    failed = errored(facts.of(calls.ids))
    table = canonical(rows, ROWS)
    by_session, offsets = _observed_rows(table, calls.ids)
    weights = np.zeros(int(offsets[-1]), np.float32)
    counts = []
    for s in range(len(calls)):
        session_rows = by_session.get(s, [])
        if not session_rows or failed[s]:
            counts.append(Observed())
            continue
        session = SessionCalls(calls.part(s, s + 1))
        where = f"session {calls.ids[s].as_py()!r}"
        each, count = _echo(session, session_rows, selection, where)
        counts.append(count)
        for row, values in zip(session_rows, each, strict=True):
            weights[offsets[row.number] : offsets[row.number] + len(values)] = values
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(weights))
    if "observation_weight" in table.column_names:
        table = table.drop_columns("observation_weight")
    table = table.append_column("observation_weight", column)
    lines = [
        calls.ids,
        *(
            pa.array([getattr(count, name) for count in counts], type_)
            for name, type_ in zip(
                OBSERVATIONS.names[1:], OBSERVATIONS.types[1:], strict=True
            )
        ),
    ]
    return table, pa.Table.from_arrays(lines, schema=OBSERVATIONS)


def _selection(
    roles: Names | None = None,
    tool_names: Names | None = None,
    alpha: float = 1.0,
    normalization: Normalization = "flat",
    missing: Missing = "raise",
    sessions: TableLike | None = None,
) -> tuple[Selection, SessionFacts]:
    """The checked options, and the facts of the sessions."""
    check_choice("normalization", normalization, Normalization)
    check_choice("missing", missing, Missing)
    check_number("alpha", alpha, 0)
    by_role = {"tool": alpha} if roles is None else _alphas("roles", roles, alpha)
    by_tool = None
    if tool_names is not None:
        if "tool" not in by_role:
            raise ArgumentError(
                f"tool_names={tool_names!r}: roles {sorted(by_role)} select no tool"
            )
        by_tool = _alphas("tool_names", tool_names, by_role["tool"])
    selection = Selection(by_role, by_tool, normalization, missing)
    return selection, session_facts(None, sessions)


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


def _echo(
    calls: SessionCalls, rows: list[_Row], selection: Selection, place: str
) -> tuple[list[Weights], Observed]:
    """The weights of each row of a session.

    Raises InvalidTurnsError if a turn lacks attribution and ``missing`` is ``"raise"``,
    or if a row does not belong to these calls.
    """
    labels = _Labels(calls, selection, place)
    weights = []
    # by label: its number of tokens in the first row that has it, and how many leading
    # tokens of them an earlier row contains
    sizes, covered = np.zeros(0, np.int64), np.zeros(0, np.int64)
    count = labels.count
    for row in rows:
        last = row.last_call(calls)
        n = len(row.ids)
        full = labels.of(last).copy()
        for start, stop in zip(row.spans[0], row.spans[1], strict=True):
            full[start:stop] = -1
        tokens = np.flatnonzero(full >= 0)
        label = full[tokens]
        n_labels = len(labels.alphas)
        sizes = _grown(sizes, n_labels)
        covered = _grown(covered, n_labels)
        in_path = np.bincount(label, minlength=n_labels)
        seen = np.bincount(label[tokens < n], minlength=n_labels)
        sizes = np.where(sizes == 0, in_path, sizes)
        fresh = _ranks(label, in_path) >= covered[label]
        inside = tokens < n
        values = np.zeros(n, np.float32)
        taken = fresh & inside
        values[tokens[taken]] = np.array(labels.alphas, np.float32)[label[taken]]
        weights.append(values)
        count.tokens_observed += int(taken.sum())
        count.tokens_repeated += int((inside & ~fresh).sum())
        complete = (in_path > 0) & (seen == in_path)
        covered = np.where(complete, _ALL, np.maximum(covered, seen))
    observed = int(sizes.sum())
    if selection.normalization == "flat" or not observed:
        return weights, count
    scale = np.float32(sum(row.trained for row in rows) / observed)
    return [values * scale for values in weights], count


def _grown(values: Longs, n: int) -> Longs:
    return np.concatenate([values, np.zeros(n - len(values), np.int64)])


def _ranks(label: Ints, sizes: Longs) -> Longs:
    """Number of earlier tokens with the same label, by token."""
    order = np.argsort(label, kind="stable")
    ranks = np.empty(len(label), np.int64)
    starts = np.cumsum(sizes) - sizes
    ranks[order] = np.arange(len(label)) - starts[label[order]]
    return ranks


@dataclass(slots=True)
class _Labelled:
    """The label of each prompt token of a call; -1: no weight."""

    labels: Ints
    # occurrences of each text, if there are no messages
    texts: Counter[bytes]


@dataclass
class _Labels:
    """The observations of one session, numbered in order of first use.

    A call's attribution applies from the first token that it assigns to a message. Earlier
    tokens (a call may render only the tail of a conversation) are attributed by calls
    whose prompts are a prefix of its prompt.
    """

    calls: SessionCalls
    selection: Selection
    place: str
    # by label
    alphas: list[float] = field(default_factory=list)
    count: Observed = field(default_factory=Observed)

    def __post_init__(self) -> None:
        self._tools = ToolCalls(self.calls)
        self._by_call: dict[int, _Labelled] = {}
        self._numbers: dict[tuple[bytes, int, bytes], int] = {}
        self._first: dict[tuple[bytes, int], int] = {}
        self._unnamed: set[tuple[bytes, int]] = set()
        self._rendered = [self._usable(call) for call in range(len(self.calls))]

    def of(self, call: int) -> Ints:
        """The label of each prompt token of a call, shape (n_prompt,)."""
        chain: list[tuple[int, int | None]] = []
        here: int | None = call
        while here is not None and here not in self._by_call:
            before = self._longest_before(here, self._gap(here))
            chain.append((here, before))
            here = before
        for here, before in reversed(chain):
            self._by_call[here] = self._label(here, before)
        self.count.messages_unnamed = len(self._unnamed)
        return self._by_call[call].labels

    def _usable(self, call: int) -> Rendered | None:
        """A call's attribution, after applying ``missing`` to what it lacks."""
        fault, flags = self.calls.gaps(call)
        if fault is None and flags is None:
            return self.calls.rendered(call)
        missing = self.selection.missing
        if missing == "raise":
            turn = self.calls.turn_index[call]
            raise InvalidTurnsError(f"{self.place}, turn {turn}: {fault or flags}")
        rendered = self.calls.rendered(call)
        if fault is not None or missing == "skip" or rendered is None:
            self.count.turns_skipped += 1
            return None
        self.count.turns_whole += 1
        is_content = rendered.message >= 0
        return Rendered(rendered.message, is_content, rendered.first, rendered.names)

    def _gap(self, call: int) -> int:
        """The first token that the call's attribution assigns to a message."""
        rendered = self._rendered[call]
        if rendered is None or not (rendered.message >= 0).any():
            return int(self.calls.n_prompt[call])
        return int(np.argmax(rendered.message >= 0))

    def _longest_before(self, call: int, most: int) -> int | None:
        """The earlier call with the longest prefix of at most ``most`` tokens as prompt."""
        if most == 0:
            return None
        sizes = self.calls.n_prompt[:call]
        fitting = np.flatnonzero((sizes <= most) & (sizes > 0))
        prompt = self.calls.prompt(call)
        for earlier in fitting[np.argsort(-sizes[fitting], kind="stable")]:
            if begins(prompt, self.calls.prompt(int(earlier))):
                return int(earlier)
        return None

    def _label(self, call: int, before: int | None) -> _Labelled:
        n = int(self.calls.n_prompt[call])
        labels = np.full(n, -1, np.int32)
        texts: Counter[bytes] = Counter()
        if before is not None:
            inherited = self._by_call[before]
            labels[: len(inherited.labels)] = inherited.labels
            texts = inherited.texts.copy()
        rendered = self._rendered[call]
        if rendered is None:
            return _Labelled(labels, texts)
        tokens = np.flatnonzero((rendered.message >= 0) & rendered.is_content)
        message = rendered.message[tokens]
        shown = np.flatnonzero(np.bincount(message))
        if len(shown) == 0:
            return _Labelled(labels, texts)
        messages = self.calls.messages(call)
        of_message = np.full(int(shown[-1]) + 1, -1, np.int32)
        if messages is not None:
            after = self._model_turn(call, messages)
            counts = Counter[bytes]()
            wanted = set((shown + rendered.first).tolist())
            for i in range(len(messages)):
                key = messages.key(i)
                if i in wanted and i > after:
                    at = i - rendered.first
                    of_message[at] = self._message(
                        messages, i, counts[key], rendered.names, at
                    )
                counts[key] += 1
        else:
            ids = self.calls.prompt(call)[tokens]
            order = np.argsort(message, kind="stable")
            stops = np.searchsorted(message[order], shown, side="right")
            for at, run in zip(
                shown.tolist(), np.split(order, stops[:-1]), strict=True
            ):
                name = (rendered.names or [])[at]
                text = name_digest(name, ids[run])
                of_message[at] = self._text(text, texts[text], name)
                texts[text] += 1
        labels[tokens] = of_message[message]
        if messages is None:
            labels[: self._first_prompt(call)] = -1
        return _Labelled(labels, texts)

    def _message(
        self,
        messages: Messages,
        i: int,
        number: int,
        names: list[str | None] | None,
        at: int,
    ) -> int:
        """The label of message i of a request, -1 if it is not selected."""
        key, role = messages.key(i), messages.roles[i]
        if role not in self.selection.roles:
            return -1
        call_id, alpha = None, self.selection.roles[role]
        if role == "tool":
            answered = self._tools.answered(messages, i)
            call_id = answered.call_id
            name = (names[at] if names is not None else None) or answered.name
            chosen = self._tool_alpha(name)
            if chosen is None:
                if name is None:
                    self._unnamed.add((key, number))
                return -1
            alpha = chosen
        if call_id is not None:
            return self._number((key, number, b""), alpha)
        reply = next(
            (
                messages.key(k)
                for k in range(i - 1, -1, -1)
                if messages.roles[k] == "assistant"
            ),
            b"",
        )
        if reply not in self.calls.replies and (key, number) in self._first:
            # the reply before it was rewritten, so this is the earlier observation
            return self._first[key, number]
        label = self._number((key, number, reply), alpha)
        self._first.setdefault((key, number), label)
        return label

    def _text(self, text: bytes, number: int, name: str | None) -> int:
        """The label of a text that only its ids identify."""
        if name is None or "tool" not in self.selection.roles:
            return -1
        alpha = self._tool_alpha(name)
        return -1 if alpha is None else self._number((text, number, b""), alpha)

    def _tool_alpha(self, name: str | None) -> float | None:
        tools = self.selection.tools
        if tools is None:
            return self.selection.roles["tool"]
        return None if name is None else tools.get(name)

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
