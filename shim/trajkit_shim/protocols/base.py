"""What the gateway needs from a protocol: requests in, replies, events and errors out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from trajkit_shim.chat.reply import Reply
from trajkit_shim.chat.request import ChatRequest, ReadOptions
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json
from trajkit_shim.protocols.blocks import Events

Verb: TypeAlias = Literal["reply", "stream", "count"]
"""What a path returns: a reply (streamed if the body asks for it), a streamed reply, or
the number of tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    """One protocol: pure functions between its JSON and the gateway's records."""

    name: str
    history: str  # the field of a request with the conversation, a list
    paths: Mapping[str, Verb]  # paths below the gateway's URL, and what each returns
    call_prefix: str  # prefix of the ids of tool calls
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
