"""What the gateway needs of a protocol: requests in, replies, events and errors out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from trajkit_shim.chat import ChatRequest, Reading
from trajkit_shim.errors import GatewayError
from trajkit_shim.reply import Reply
from trajkit_shim.wire import Json

Verb: TypeAlias = Literal["reply", "stream", "count"]
"""What a path asks for: a reply (streamed where the body says so), a reply that is
streamed, or the number of tokens of the prompt."""


class Events(Protocol):
    """The events of one streamed reply, as bytes for the wire, in order."""

    def opening(self) -> bytes:
        """What is sent before the reply is known; may be empty."""
        ...

    def ping(self) -> bytes:
        """A sign of life. Clients take any number of them between the other events."""
        ...

    def partial(self, reply: Reply) -> bytes:
        """What is new in a reply that is not whole yet; may be empty.

        Each such reply is the beginning of the next one, and of the whole one.
        """
        ...

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """Everything that is left of the whole reply, to the end of the stream."""
        ...

    def error(self, error: GatewayError) -> bytes:
        """The end of a stream whose reply will not come."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    """One protocol: pure functions between the wire and the gateway's own forms."""

    name: str
    # paths behind the gateway's URL, and what each asks for
    paths: Mapping[str, Verb]
    # what the ids of tool calls start with
    call_prefix: str
    # raises `GatewayError` where a field is missing, malformed or asks for too much
    read: Callable[[Json, Reading], ChatRequest]
    write: Callable[[Reply, ChatRequest], Json]
    events: Callable[[ChatRequest], Events]
    error: Callable[[GatewayError], Json]
    # of a path that asks for a count; None: as ``read``
    read_for_count: Callable[[Json, Reading], ChatRequest] | None = None
    # the answer of such a path
    count: Callable[[int], Json] = lambda tokens: {"input_tokens": tokens}
    # codes of errors that a streaming client understands only as an event
    told_in_stream: frozenset[str] = field(default=frozenset())
