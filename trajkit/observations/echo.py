"""Weights of observed tokens, each learned once per rollout."""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from trajkit.errors import InvalidTurnsError
from trajkit.observations.attribution import (
    Ints,
    Messages,
    Rendered,
    SessionCalls,
    ToolCalls,
)
from trajkit.observations.observed_rows import (
    Longs,
    Observed,
    ObservedRow,
    Selection,
    Weights,
    begins,
    factor,
)
from trajkit.turns.prefix import lcp

_ALL = np.iinfo(np.int64).max


def echo(
    calls: SessionCalls, rows: list[ObservedRow], selection: Selection, place: str
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
    all_tokens = 0
    ends: list[Ints] = []
    for row in rows:
        last = row.last_call(calls, range(len(calls)))
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

        path = calls.path(last)
        shared = row.shared
        if n < len(path):  # cut: the complete row may share more
            shared = max((lcp(path, end) for end in ends), default=0)
        ends.append(path)
        all_tokens += len(path) - shared
    scale = np.float32(
        factor(
            selection.normalization,
            all_tokens,
            int(sizes.sum()),
            sum(row.trained for row in rows),
        )
    )
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
