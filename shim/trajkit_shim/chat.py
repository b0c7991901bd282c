"""The chat request that every protocol's request becomes.

Messages are canonical: one form whatever the protocol, and whether a message comes from
a client or is the gateway's own reply on its way out, so that a client's echo of a reply
equals the reply's record.

- ``role`` is ``system``, ``user``, ``assistant`` or ``tool``; ``content`` is a string.
- An assistant message may have ``reasoning_content``, and ``tool_calls`` in OpenAI's
  form, whose ``arguments`` are JSON text as it was sampled. Where text was sampled after
  a call, ``sampled`` holds the reply as it was, from the end of its reasoning on; only
  the gateway itself writes it (`trajkit_shim.echo`).
- A tool message has ``tool_call_id``.
- What means nothing to the model (cache hints, annotations, ...) is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from trajkit_shim.sampling import Wishes
from trajkit_shim.wire import Json

Images: TypeAlias = Literal["refuse", "omit"]

OMITTED_IMAGE = "[image omitted]"
"""What stands where an image was, with ``images="omit"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a gateway does with the parts of a request that no model here can take."""

    # refuse: answered with 400. omit: `OMITTED_IMAGE` stands in its place
    images: Images = "refuse"


AS_GIVEN = Reading()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request for an assistant message."""

    # canonical, at least one
    messages: list[Json]
    # in OpenAI's form; None: no tool may be called
    tools: list[Json] | None
    asked: Wishes
    stream: bool
    # a stream ends with its token counts (OpenAI Chat Completions)
    include_usage: bool = False
    # types of the tools that only a provider can run: the model is not told of them
    left_out: tuple[str, ...] = ()
    # namespace and name, as the client knows them, of tools that the model knows under
    # one name (OpenAI Responses)
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
