"""Grammars of the replies that clients require, as structural tags of xgrammar (0.2).

SGLang and vLLM sample under such a grammar, and give the logprobs of the distribution
that it leaves.
"""

from collections.abc import Mapping

from trajkit_shim.chat.request import ANY_OBJECT, ChatRequest, function_of
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json
from trajkit_shim.replies.parse import END_THINK, THINK, CallForm

PINNED = frozenset("ebnf json_schema regex structural_tag structured_outputs".split())
"""Parameters of the engines that hold a grammar."""


def grammar(
    request: ChatRequest,
    form: CallForm | None,
    pinned: Mapping[str, object],
    *,
    opened: bool,
    reasons: bool,
) -> Json | None:
    """Return the structural tag that a request requires of its reply, or None.

    Arguments match the tool's schema if that is required, else they are any object. A
    reply without a required call may have text before each call, and if only one call
    is allowed none after it. Reasoning may come first: the prompt ``opened`` it, or the
    model may begin with it (``reasons``). ``pinned`` are the session's parameters of the
    engine. Raises `GatewayError` (400): a required tool is not offered, the session has a
    grammar of its own, or the form of calls is unknown.
    """
    required = request.required
    tools = {str(f["name"]): f for f in map(function_of, request.tools or ())}
    wanted = [name for name in required.names if name not in tools]
    if wanted or (required.call and not tools):
        which = f"the tool {wanted[0]!r}" if wanted else "a tool"
        rule = "required" if required.call else "allowed"
        raise GatewayError(f"a call of {which} is {rule}, which is not offered")
    if required.schema is None and not (required.limits_calls and tools):
        return None
    own = PINNED & pinned.keys()
    if own:
        message = f"the session fixes {min(own)}: a request cannot require another form"
        raise GatewayError(message, code="unsupported_value")
    elements: list[Json] = []
    if required.schema is not None and not required.call:
        elements.append({"type": "json_schema", "json_schema": required.schema})
    if tools:
        if form is None:
            message = "the parser of replies does not define how calls are written: "
            message += "no form of a reply can be required"
            raise GatewayError(message, code="unsupported_value")
        tags = []
        for name in dict.fromkeys(required.names) or tools:
            schema = tools[name].get("parameters") if name in required.strict else None
            tags.append(
                form.tag(name, schema if isinstance(schema, dict) else ANY_OBJECT)
            )
        found: Json = {"tags": tags, "stop_after_first": not required.parallel}
        if required.call or required.schema is not None:
            kind = {"type": "tags_with_separator", "separator": "\n"}
            elements.append({**kind, **found, "at_least_one": True})
        else:
            elements.append(
                {"type": "triggered_tags", "triggers": [form.opens], **found}
            )
    reply: Json = (
        elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
    )
    if opened or reasons:
        reply = {"type": "sequence", "elements": [*_reasoning(opened), reply]}
    return {"type": "structural_tag", "format": reply}


def _reasoning(opened: bool) -> list[Json]:
    """The reasoning before a reply; it is optional unless the prompt opened it."""
    inside: Json = {"type": "tag", "content": {"type": "any_text"}, "end": END_THINK}
    inside["begin"] = "" if opened else THINK
    gap: Json = {"type": "regex", "pattern": "\\n{0,2}"}
    return [inside if opened else {"type": "optional", "content": inside}, gap]
