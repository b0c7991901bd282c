"""Chat transcripts: text that no engine sampled, encoded by a tokenizer.

Each reply becomes a call. Its prompt is the chat template's text of the messages before it,
and its output is what the template appends for the reply. ``sampled`` is false,
``call_kind`` is "transcript", and there are no logprobs.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trajkit.analysis.tokenizer import Codec
from trajkit.errors import FormatError
from trajkit.importers.findings import ChatTokenizer, Finding, Head, Refused, text_of
from trajkit.importers.json_files import findings

NAME = "chat"

# ShareGPT's names of roles
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


def detect(head: Head) -> bool:
    """A list of messages, and no ids or response."""
    known = head.has("messages") or head.has("conversations")
    others = ("prompt_ids", "response", "nodes", "trajectory", "trace_id")
    return known and not any(head.has(name) for name in others)


def read(file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
    """A call for each reply of each transcript."""
    if tokenizer is None:
        raise FormatError(
            f"{file}: a transcript has no token ids: pass a tokenizer with a chat template"
        )
    return findings(file, partial(_calls, file, tokenizer))


def _calls(
    file: Path, tokenizer: ChatTokenizer, place: str, value: dict[str, object]
) -> Iterator[Finding]:
    # each transcript is a session; the file's name makes its name unique
    name = text_of(value.get("session_id")) or text_of(value.get("id"))
    found = Finding(place, name or f"{file.name}, {place}")
    with found:
        messages = _messages(value.get("messages", value.get("conversations")))
        replies = [k for k, one in enumerate(messages) if one["role"] == "assistant"]
        if not replies:
            raise Refused("no_output_ids", "it has no reply")
    if found.problem:
        yield found
        return
    for k in replies:
        one = Finding(f"{place}, message {k}", found.session)
        with one:
            one.fields = _reply(messages[: k + 1], value.get("tools"), tokenizer)
            one.remarks.append(("not_sampled", ""))
        yield one


def _reply(
    messages: list[dict[str, object]], tools: object, tokenizer: ChatTokenizer
) -> dict[str, object]:
    """The call whose reply is the last of the messages."""
    before = messages[:-1]
    if not before:
        raise Refused("no_prompt_ids", "no message comes before it")
    texts = []
    for shown, asks in ((before, True), (messages, False)):
        try:
            text = tokenizer.apply_chat_template(
                shown, tools=tools, add_generation_prompt=asks, tokenize=False
            )
        # a template may raise an error of jinja2, or anything in its filters
        except Exception as error:
            raise Refused("refused", str(error)) from None
        texts.append(str(text))
    prompt, complete = texts
    if not complete.startswith(prompt):
        detail = "with the reply, the template renders another prompt"
        raise Refused("not_a_prefix", detail)
    codec = Codec(tokenizer)
    return {
        "prompt_ids": codec.ids(prompt),
        "output_ids": codec.ids(complete[len(prompt) :]),
        "prompt_messages": before,
        "response_message": messages[-1],
        "call_kind": "transcript",
        "sampled": False,
    }


def _messages(listed: object) -> list[dict[str, object]]:
    """The messages in OpenAI's form."""
    if not isinstance(listed, list):
        detail = f"its messages are a {type(listed).__name__}, not a list"
        raise Refused("unreadable", detail)
    messages = []
    for k, one in enumerate(listed):
        if not isinstance(one, dict):
            detail = f"message {k} is a {type(one).__name__}, not an object"
            raise Refused("unreadable", detail)
        if "from" in one and "role" not in one:
            role = _ROLES.get(str(one["from"]))
            if role is None:
                known = ", ".join(_ROLES)
                detail = f"message {k} is from {one['from']!r}: expected one of {known}"
                raise Refused("unreadable", detail)
            one = {"role": role, "content": one.get("value")}
        if not isinstance(one.get("role"), str):
            raise Refused("unreadable", f"message {k} has no role")
        messages.append(one)
    return messages
