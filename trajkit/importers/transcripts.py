"""Chat transcripts: text that no engine sampled, encoded by a tokenizer.

Each reply becomes a call. Its prompt is the chat template's text of the messages before it,
and its output is what the template appends for the reply. ``sampled`` is false,
``call_kind`` is "transcript", and there are no logprobs.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trajkit.errors import FormatError
from trajkit.importers.findings import Finding, Head, Options, text_of
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


def read(file: Path, options: Options) -> Iterator[Finding]:
    """A call for each reply of each transcript.

    Raises
    ------
    FormatError
        There is no tokenizer, or none with a chat template.
    """
    if options.render is None or options.encode is None:
        raise FormatError(
            f"{file}: a transcript has no token ids: pass a tokenizer with a chat template"
        )
    return findings(file, partial(_calls, file, options))


def _calls(
    file: Path, options: Options, place: str, value: dict[str, object]
) -> Iterator[Finding]:
    # each transcript is a session; the file's name makes its name unique
    name = text_of(value.get("session_id")) or text_of(value.get("id"))
    found = Finding(place, name or f"{file.name}, {place}")
    messages, fault = _messages(value)
    if fault:
        yield found.refuse("unreadable", fault)
        return
    replies = list(_replies(found, messages, value.get("tools"), options))
    yield from replies
    if not replies:
        yield found.refuse("no_output_ids", "it has no reply")


def _replies(
    about: Finding, messages: list[dict[str, object]], tools: object, options: Options
) -> Iterator[Finding]:
    assert options.render is not None
    assert options.encode is not None
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        found = Finding(f"{about.place}, message {k}", about.session)
        if k == 0:
            yield found.refuse("no_prompt_ids", "no message comes before it")
            continue
        try:
            prompt = options.render(messages[:k], tools, True)
            whole = options.render(messages[: k + 1], tools, False)
        # a template may raise an error of jinja2, or anything in its filters
        except Exception as error:
            yield found.refuse("refused", str(error))
            continue
        if not whole.startswith(prompt):
            yield found.refuse(
                "not_a_prefix", "with the reply, the template renders another prompt"
            )
            continue
        found.fields = {
            "prompt_ids": options.encode(prompt),
            "output_ids": options.encode(whole[len(prompt) :]),
            "prompt_messages": messages[:k],
            "response_message": message,
            "call_kind": "transcript",
            "sampled": False,
        }
        found.remarks.append(("not_sampled", ""))
        yield found


def _messages(value: dict[str, object]) -> tuple[list[dict[str, object]], str]:
    """The messages in OpenAI's form, and what is wrong with the first invalid one."""
    listed = value.get("messages", value.get("conversations"))
    messages: list[dict[str, object]] = []
    if not isinstance(listed, list):
        return messages, f"its messages are a {type(listed).__name__}, not a list"
    for k, one in enumerate(listed):
        if not isinstance(one, dict):
            return messages, f"message {k} is a {type(one).__name__}, not an object"
        if "from" in one and "role" not in one:
            role = _ROLES.get(str(one["from"]))
            if role is None:
                known = ", ".join(_ROLES)
                said = f"message {k} is from {one['from']!r}: expected one of {known}"
                return messages, said
            one = {"role": role, "content": one.get("value")}
        if not isinstance(one.get("role"), str):
            return messages, f"message {k} has no role"
        messages.append(one)
    return messages, ""
