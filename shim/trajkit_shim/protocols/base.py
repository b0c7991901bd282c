"""What the gateway needs from a protocol: requests in, replies, events and errors out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from trajkit_shim.chat.reply import Reply
from trajkit_shim.chat.request import ChatRequest, ReadOptions
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json

Verb: TypeAlias = Literal["reply", "stream", "count"]
"""What a path returns: a reply (streamed if the body asks for it), a streamed reply, or
the number of tokens of the prompt."""


class Events(Protocol):
    """The events of one streamed reply as bytes, in order."""

    def opening(self) -> bytes:
        """Return what is sent before the reply is known; may be empty."""
        ...

    def ping(self) -> bytes:
        """Return a keep-alive event. Clients accept any number between other events."""
        ...

    def partial(self, reply: Reply) -> bytes:
        """Return what is new in an incomplete reply; may be empty.

        Each such reply is a prefix of the next one, and of the complete one.
        """
        ...

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """Yield the rest of the complete reply, to the end of the stream."""
        ...

    def error(self, error: GatewayError) -> bytes:
        """Return the end of a stream that failed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    """One protocol: pure functions between its JSON and the gateway's records."""

    name: str
    # paths below the gateway's URL, and what each returns
    paths: Mapping[str, Verb]
    # prefix of the ids of tool calls
    call_prefix: str
    # raises `GatewayError` for missing, invalid or unsupported fields
    read: Callable[[Json, ReadOptions], ChatRequest]
    write: Callable[[Reply, ChatRequest], Json]
    events: Callable[[ChatRequest], Events]
    error: Callable[[GatewayError], Json]
    # for a path that returns a count; None: as ``read``
    read_for_count: Callable[[Json, ReadOptions], ChatRequest] | None = None
    # the body of its answer
    count: Callable[[int], Json] = lambda tokens: {"input_tokens": tokens}
    # codes of errors that a streaming client only understands as an event
    streamed_errors: frozenset[str] = field(default=frozenset())
