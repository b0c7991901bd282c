"""Recognizes, by its bytes, the part of a request that its session has seen.

A client sends the entire conversation with each request. Of each branch of a session the
latest answered request is kept. A body that begins with the same bytes up to the end of an
earlier history is parsed, read and restored from there on only. Any other body is read
completely.
"""

import math
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from trajkit_shim.chat.request import ChatRequest, ReadOptions
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import DECODER, Json, check_value, parse_object
from trajkit_shim.prompting.reply_matching import RestoredRequest

Read: TypeAlias = Callable[[Json, ReadOptions], ChatRequest]

SHORT = 1 << 13
"""Bytes of a body. A shorter one is read completely, which takes less than a lookup."""

_HASHED = 1 << 13  # bytes that are hashed at once
_SPACE = b" \t\n\r"
# bytes of a message besides its text
_OVERHEAD = 1024
# in the place of a history's known messages; unpredictable for clients
_KNOWN = secrets.token_hex(16)


class Mark(NamedTuple):
    """The end of the history of an answered request."""

    offset: int  # in the body
    n_messages: int  # restored messages up to it
    unnamed_calls: int  # `ChatRequest.unnamed_calls`
    n_bytes: int  # memory of its messages, about


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRequest:
    """An answered request, and the ends of the histories that it begins with."""

    protocol: str  # its name
    history: str  # the field with the conversation (`WireProtocol.history`)
    body: bytes  # up to the last of them
    digests: list[bytes]  # of its start, one per `_HASHED` bytes
    fields: Json  # those before the history
    n_front: int  # `ChatRequest.n_front`
    marks: list[Mark]
    restored: RestoredRequest

    @property
    def n_bytes(self) -> int:
        """Memory, about: the body, its messages and their records."""
        return len(self.body) + self.marks[-1].n_bytes


class Match(NamedTuple):
    """A known request, and at how many of its marks a body still has the same bytes."""

    known: KnownRequest
    n_marks: int

    @property
    def n_shared(self) -> int:
        """How many bytes both begin with, at least."""
        return self.known.marks[self.n_marks - 1].offset if self.n_marks else 0


@dataclass(slots=True, kw_only=True)
class ReadRequest:
    """A request, and what is known of its start."""

    body: bytes
    digests: list[bytes]  # see `KnownRequest`
    chat: ChatRequest = field(init=False)
    # of the messages that are known; `ReplyIndex.restore` adds the others
    head: RestoredRequest = field(default_factory=RestoredRequest)
    marks: list[Mark] = field(default_factory=list)  # in the known part
    # the end of the history, and the fields before it; -1: not found
    end: int = -1
    fields: Json = field(default_factory=dict)

    @property
    def identity(self) -> bytes:
        """Return what is equal for equal bodies only, and short."""
        last = self.digests[-1] if self.digests else b""
        return last + self.body[len(self.digests) * _HASHED :]

    def known(
        self, protocol: str, history: str, restored: RestoredRequest
    ) -> KnownRequest | None:
        """Return what to keep once it was answered; None: nothing of it."""
        marks = self.marks
        # the next message may belong to an assistant's last one
        if self.end >= 0 and restored.messages[-1]["role"] != "assistant":
            n_bytes, n_known = 0, 0
            if marks:
                n_bytes, n_known = marks[-1].n_bytes, marks[-1].n_messages
            # a message is kept as text and as JSON
            for record in restored.logged[n_known:]:
                n_bytes += 2 * len(record.body) + _OVERHEAD
            unnamed = self.chat.unnamed_calls
            n_messages = len(restored.messages)
            marks = [*marks, Mark(self.end, n_messages, unnamed, n_bytes)]
        if not marks:
            return None
        return KnownRequest(
            protocol=protocol,
            history=history,
            body=self.body[: marks[-1].offset],
            digests=self.digests,
            fields=self.fields,
            n_front=self.chat.n_front,
            marks=marks,
            restored=restored,
        )


def find_known(
    body: bytes, protocol: str, known: Iterable[KnownRequest]
) -> Match | None:
    """Return a protocol's request that shares the most with a body, if it is long."""
    best = None
    if len(body) < SHORT:
        return None
    for request in known:
        if request.protocol != protocol:
            continue
        n_marks, start = 0, 0
        for mark in request.marks:
            if not body.startswith(request.body[start : mark.offset], start):
                break
            n_marks, start = n_marks + 1, mark.offset
        match = Match(request, n_marks)
        if best is None or match.n_shared > best.n_shared:
            best = match
        if n_marks == len(request.marks):
            break
    return best


def read_request(
    body: bytes,
    history: str,
    read: Read,
    options: ReadOptions,
    match: Match | None,
    most: float = math.inf,
) -> ReadRequest | None:
    """Read a request; None: more than ``most`` bytes would have to be parsed.

    Raises `GatewayError` as `parse_object` and ``read``.
    """
    digests = [] if match is None else match.known.digests[: match.n_shared // _HASHED]
    for start in range(len(digests) * _HASHED, len(body) - _HASHED + 1, _HASHED):
        before = digests[-1] if digests else b""
        block = before + body[start : start + _HASHED]
        digests.append(blake2b(block, digest_size=16).digest())
    request = ReadRequest(body=body, digests=digests)
    if match is not None:
        marks = match.known.marks
        n_marks = match.n_marks
        # a request that is sent again has nothing after the last one
        for n_used in range(n_marks, max(0, n_marks - 2), -1):
            if len(body) - marks[n_used - 1].offset > most:
                return None
            if _continue(request, match.known, marks[:n_used], read, options):
                return request
    if len(body) > most:
        return None
    if len(body) < SHORT:
        fields = parse_object(body)
    else:
        fields, request.fields, request.end = _parse(body, history)
    request.chat = read(fields, options)
    return request


def _continue(
    request: ReadRequest,
    known: KnownRequest,
    marks: list[Mark],
    read: Read,
    options: ReadOptions,
) -> bool:
    """Read a request that begins like a known one up to the last mark, if it goes."""
    mark, name = marks[-1], known.history
    start = f'{{"{name}":["{_KNOWN}"'.encode()
    tail = start + request.body[mark.offset :]
    try:
        fields, _, end = _parse(tail, name)
        history = fields[name]
        # the field may be there twice
        if not isinstance(history, list) or history[0] != _KNOWN or len(history) < 2:
            return False
        chat = read(
            {**known.fields, **fields, name: history[1:]},
            replace(options, unnamed_calls=mark.unnamed_calls),
        )
    except GatewayError:
        # the error of the complete body names the right place
        return False
    head = known.restored.head(mark.n_messages)
    n_front = known.n_front
    if chat.n_front != n_front or chat.messages[:n_front] != head.messages[:n_front]:
        return False
    request.chat = replace(chat, messages=head.messages + chat.messages[n_front:])
    request.head, request.marks, request.fields = head, marks, known.fields
    request.end = mark.offset + end - len(start)
    return True


@lru_cache
def _list_start(name: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%s"[ \t\n\r]*:[ \t\n\r]*\[' % name.encode())


def _parse(body: bytes, name: str) -> tuple[Json, Json, int]:
    """Parse an object whose field of that name is a list, as `parse_object`.

    Returns the object, its fields before that one, and where the last value of the list
    ends (-1: not found). Each byte is parsed once, because other threads wait meanwhile.
    """
    found = _list_start(name).search(body)
    if found is not None:
        other = f'"{_KNOWN}":0'
        # another field may have that name, and errors name a place in the complete body
        with suppress(GatewayError, ValueError, RecursionError):
            before = parse_object(body[: found.start()] + f"{other}}}".encode())
            text = body[found.end() - 1 :].decode()
            history, end = DECODER.raw_decode(text)
            after = parse_object(f"{{{other}{text[end:]}".encode())
            del before[_KNOWN], after[_KNOWN]
            items = text[: end - 1].encode()
            check_value({name: history}, items)
            stop = found.end() - 1 + len(items.rstrip(_SPACE))
            if name in after:
                # the last one of a repeated field counts
                stop = -1
            return {**before, name: history, **after}, before, stop
    return parse_object(body), {}, -1
