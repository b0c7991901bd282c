"""What the gateway needs from a protocol: requests in, replies, events and errors out."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from trajkit_shim.chat.images import Images, read_images
from trajkit_shim.chat.reply import Reply
from trajkit_shim.chat.request import ChatRequest
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json
from trajkit_shim.protocols.stream import event

Verb: TypeAlias = Literal["reply", "stream", "count"]
"""What a path returns: a reply (streamed if the body asks for it), a streamed reply, or
the number of tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    """One protocol: fields, and functions between its JSON and the gateway's records."""

    name: str
    paths: Mapping[str, Verb]  # paths below the gateway's URL, and what each returns
    call_prefix: str = "call_"  # prefix of the ids of tool calls
    known: frozenset[str]  # the fields of a request
    # those that are accepted with the one value that has no effect
    neutral: Mapping[str, object] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # not for a count
    # raises `GatewayError` for missing, invalid or unsupported fields
    parse: Callable[[Fields], ChatRequest]
    write: Callable[[Reply, ChatRequest], Json]
    # the events of a streamed reply, after a number of keep-alive events
    events: Callable[[Reply, ChatRequest, int], Iterable[Json]]
    # a keep-alive event, after a number of others; clients accept any number of them
    ping: Callable[[ChatRequest, int], bytes]
    error: Callable[[GatewayError], Json]
    # the end of a stream that failed, if it is not `error`
    failed: Callable[[GatewayError, ChatRequest, int], Iterable[Json]] | None = None
    stream_end: bytes = b""
    # the field of a request for a count that may contain the request for a reply
    count_of: str | None = None
    # the body of its answer
    count: Callable[[int], Json] = lambda tokens: {"input_tokens": tokens}
    # codes of errors that a streaming client only understands as an event
    streamed_errors: frozenset[str] = frozenset()

    def read(
        self, body: Json, images: Images = "refuse", *, count: bool = False
    ) -> ChatRequest:
        """Read the body of a request for a reply or a count; raises `GatewayError`."""
        ignored: Counter[str] = Counter()
        fields = Fields(body, ignored=ignored)
        if count and self.count_of:
            fields = Fields(fields.get_object(self.count_of) or body, ignored=ignored)
        for name in () if count else self.required:
            if body.get(name) is None:
                fields.refuse(name, "missing")
        fields.only(self.known, self.neutral)
        fields.get_text("model")
        request = replace(self.parse(fields), ignored=ignored)
        if request.messages[-1]["role"] == "assistant":
            # it is shown as complete, and the model answers with another message
            ignored["continuation of the last message"] += 1
        read_images(request.messages, images)
        return request

    def stream(
        self, answer: Reply | GatewayError, request: ChatRequest, n_pings: int
    ) -> Iterator[bytes]:
        """Yield the encoded events of a reply or an error, to the end of the stream."""
        if isinstance(answer, Reply):
            events = self.events(answer, request, n_pings)
        elif self.failed is None:
            events = [self.error(answer)]
        else:
            events = self.failed(answer, request, n_pings)
        yield from map(event, events)
        if self.stream_end:
            yield self.stream_end


def words_for(
    error: GatewayError, kinds: Mapping[int, str], too_long: str
) -> tuple[str, str]:
    """Return a protocol's word for an error, and the message.

    ``kinds``: the words by status; that of 400 or 500 is also the word for all others.
    ``too_long``: the format of the message for a prompt that is too long.
    """
    message = error.message
    if error.overflow is not None:
        message = too_long.format(*error.overflow)
    return kinds.get(error.status, kinds[500 if error.status >= 500 else 400]), message
