"""Recognizes, by its bytes, the part of a request that its session has seen.

A client sends the entire conversation with each request. Of each branch of a session the
latest answered request is kept. A body that begins with the same bytes up to the end of an
earlier history is parsed, read and restored from there on only. Any other body is read
completely.
"""

import math
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from os.path import commonprefix
from typing import NamedTuple, TypeAlias

import numpy as np

from trajkit.turns import lcp
from trajkit_shim.chat.request import ChatRequest
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import DECODER, Json, check_value, parse_object
from trajkit_shim.prompting.reply_matching import RestoredRequest

Read: TypeAlias = Callable[[Json], ChatRequest]

_SPACE = b" \t\n\r"
# bytes of a message besides its text
_OVERHEAD = 1024
# a name that no client's field has
_OTHER = secrets.token_hex(16)
# what follows a message if there is another one after it
_MORE = re.compile(rb"[ \t\n\r]*,")


class Mark(NamedTuple):
    """The end of the history of an answered request."""

    offset: int  # in the body
    n_messages: int  # restored messages up to it
    hasher: blake2b  # of the body up to it


@dataclass(slots=True, kw_only=True)
class ReadRequest:
    """A request, and what is known of its start."""

    protocol: str  # its name
    body: bytes
    chat: ChatRequest
    # the end of the history, and the fields before it; -1: not found
    end: int
    fields: Json
    # the messages that are known; `ReplyIndex.restore` adds the others
    restored: RestoredRequest = field(default_factory=RestoredRequest)
    marks: list[Mark] = field(default_factory=list)  # in the known part
    hasher: blake2b = field(default_factory=blake2b)  # of the body up to the end
    identity: bytes = b""  # a digest of the body

    @property
    def n_new(self) -> int | None:
        """Bytes of the body after the messages that are known; None: none are."""
        return len(self.body) - self.marks[-1].offset if self.marks else None

    @property
    def n_bytes(self) -> int:
        """Memory, about: the body, and each message as text and as JSON."""
        return 3 * len(self.body) + _OVERHEAD * self.marks[-1].n_messages

    def answered(self, restored: RestoredRequest) -> "ReadRequest | None":
        """Return what to keep once it was answered; None: nothing of it."""
        marks = self.marks
        # the next message may belong to an assistant's last one
        if self.end >= 0 and restored.messages[-1]["role"] != "assistant":
            mark = Mark(self.end, len(restored.messages), self.hasher)
            marks = [*marks, mark]
        # images are in the store
        chat = replace(self.chat, messages=[], images=())
        kept = replace(self, chat=chat, restored=restored, marks=marks)
        return kept if marks else None


def find_known(
    body: bytes, protocol: str, known: Iterable[ReadRequest]
) -> ReadRequest | None:
    """Return a protocol's request that shares the most with a body, with shared marks.

    In the body, new messages follow the last of them.
    """
    best: ReadRequest | None = None
    for request in known:
        if request.protocol != protocol:
            continue
        n_bytes = _n_shared(body, request.body)
        n_marks = bisect_right(request.marks, n_bytes, key=lambda mark: mark.offset)
        shares_all = n_marks == len(request.marks)
        # a request that is sent again has nothing after its last one
        if n_marks and not _MORE.match(body, request.marks[n_marks - 1].offset):
            n_marks -= 1
        marks = request.marks[:n_marks]
        if marks and (best is None or marks[-1].offset > best.marks[-1].offset):
            best = replace(request, marks=marks)
        if shares_all:
            break
    return best


def _n_shared(body: bytes, other: bytes) -> int:
    """How many bytes two bodies share at their start."""
    n_words = min(len(body), len(other)) // 4
    words = (np.frombuffer(each, np.int32, n_words) for each in (body, other))
    start = 4 * lcp(*words)
    ends = body[start : start + 4], other[start : start + 4]
    return start + len(commonprefix(ends))  # noqa: RUF071


def read_request(
    body: bytes,
    protocol: str,
    history: str,
    read: Read,
    known: ReadRequest | None,
    most: float = math.inf,
) -> ReadRequest | None:
    """Read a request; None: more than ``most`` bytes would have to be parsed.

    ``known``: from `find_known`. Raises `GatewayError` as `parse_object` and ``read``.
    """
    if known and len(body) - known.marks[-1].offset > most:
        return None
    request = _continue(known, body, history, read) if known else None
    if request is None:
        if len(body) > most:
            return None
        fields, before, end = _parse(body, history)
        chat = read(fields)
        request = ReadRequest(
            protocol=protocol, body=body, chat=chat, end=end, fields=before
        )
    # what follows the last mark, up to the end of the history and of the body
    start, hasher = 0, blake2b(digest_size=16)
    if request.marks:
        start, hasher = request.marks[-1].offset, request.marks[-1].hasher.copy()
    stop, view = max(start, request.end), memoryview(body)
    hasher.update(view[start:stop])
    request.hasher = hasher.copy()
    hasher.update(view[stop:])
    request.identity = hasher.digest()
    return request


def _continue(
    known: ReadRequest, body: bytes, name: str, read: Read
) -> ReadRequest | None:
    """Read what follows a known request's last mark; None: the body must be parsed."""
    mark = known.marks[-1]
    # with a number in the place of the known messages
    start = f'{{"{name}":[0'.encode()
    try:
        fields, _, end = _parse(start + body[mark.offset :], name)
        history = fields[name]
        # the field may be there twice
        if end < 0 or not isinstance(history, list):
            return None
        chat = read({**known.fields, **fields, name: history[1:]})
    except GatewayError:
        # the error of the complete body names the right place
        return None
    head = known.restored.head(mark.n_messages)
    n_front = known.chat.n_front
    if chat.n_front != n_front or chat.messages[:n_front] != head.messages[:n_front]:
        return None
    chat = replace(chat, messages=head.messages + chat.messages[n_front:])
    end += mark.offset - len(start)
    return replace(known, body=body, chat=chat, restored=head, end=end)


def _parse(body: bytes, name: str) -> tuple[Json, Json, int]:
    """Parse an object whose field of that name is a list, as `parse_object`.

    Returns the object, its fields before that one, and where the last value of the list
    ends (-1: not found). Each byte is parsed once, because other threads wait meanwhile.
    """
    found = re.search(rb'"%s"[ \t\n\r]*:[ \t\n\r]*\[' % name.encode(), body)
    if found is not None:
        other = f'"{_OTHER}":0'
        # another field may have that name, and errors name a place in the complete body
        with suppress(GatewayError, ValueError, RecursionError):
            before = parse_object(body[: found.start()] + f"{other}}}".encode())
            text = body[found.end() - 1 :].decode()
            history, end = DECODER.raw_decode(text)
            after = parse_object(f"{{{other}{text[end:]}".encode())
            del before[_OTHER], after[_OTHER]
            items = text[: end - 1].encode()
            check_value({name: history}, items)
            stop = found.end() - 1 + len(items.rstrip(_SPACE))
            if name in after:
                # the last one of a repeated field counts
                stop = -1
            return {**before, name: history, **after}, before, stop
    return parse_object(body), {}, -1
