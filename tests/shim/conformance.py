"""What each protocol answers in each case: the table, and the clients that ask.

``python -m tests.shim.conformance`` prints the tables of ``docs/serving.md``.
"""

import base64
from dataclasses import dataclass, field
from typing import ClassVar

import anthropic
import openai
import pytest
from google.genai import errors as google
from google.genai import types
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.shim.clients import NAMES, TOOLS, image_part, saying
from tests.shim.fakes import said, tool, user


def _words(table):
    """The client's own words by protocol, of the lines of a table; - for none."""
    for line in table.strip().splitlines():
        *place, words = (cell.strip() for cell in line.split("|"))
        yield place, tuple(None if word == "-" else word for word in words.split())


# What an answered call ends with, by case.
ENDS = {
    case: words
    for (case,), words in _words("""
text                        | stop       end_turn      completed  STOP
reasoning, then text        | stop       end_turn      completed  STOP
text and two calls          | tool_calls tool_use      completed  STOP
text after a call           | tool_calls tool_use      completed  STOP
a call that does not parse  | stop       end_turn      completed  STOP
cut by the token limit      | length     max_tokens    incomplete MAX_TOKENS
a call, then cut            | length     max_tokens    incomplete MAX_TOKENS
a stop string of the client | stop       stop_sequence -          STOP
after a tool that failed    | stop       end_turn      completed  STOP
a call that was required    | tool_calls tool_use      completed  STOP
""")
}
_INVALID = "invalid_request_error"
# What a call that fails is told, by case: the status, and the word for machines.
FAILURES = {
    case: (int(status), words)
    for (case, status), words in _words(f"""
an unknown session | 401 | \
invalid_api_key authentication_error invalid_api_key UNAUTHENTICATED
a closed session | 410 | session_closed {_INVALID} session_closed FAILED_PRECONDITION
no turn left | 403 | \
max_turns_exceeded permission_error max_turns_exceeded PERMISSION_DENIED
no token left | 403 | max_output_tokens_exceeded permission_error \
max_output_tokens_exceeded PERMISSION_DENIED
a body that is too long | 413 | \
body_too_long request_too_large body_too_long INVALID_ARGUMENT
a parameter out of range | 400 | - {_INVALID} - INVALID_ARGUMENT
a required tool that is not offered | 400 | - {_INVALID} - INVALID_ARGUMENT
an image | 400 | unsupported_content {_INVALID} unsupported_content INVALID_ARGUMENT
a prompt that is too long | 400 | context_length_exceeded {_INVALID} \
context_length_exceeded INVALID_ARGUMENT
refused by the engine | 400 | engine_error {_INVALID} engine_error INVALID_ARGUMENT
the engine fails | 502 | engine_error api_error engine_error UNAVAILABLE
the engine cuts the call short | 503 | \
engine_error overloaded_error engine_error UNAVAILABLE
a fault of the gateway | 500 | internal_error api_error internal_error INTERNAL
""")
}
# Before anything was sent; after the first keep-alive event of a stream; and while the
# answer of a turn that is in the log is sent.
BEFORE, MIDDLE, SENDING = "before its answer", "in mid-stream", "while it is answered"
_CLOSED = f"session_closed {_INVALID} session_closed FAILED_PRECONDITION"
_LATE = f"session_closed {_INVALID} invalid_prompt FAILED_PRECONDITION"
# What becomes of a call that is cut off, by what does it and when: what is in the log, and
# what its client is told. None: there is nobody to tell.
CUTS = {
    (what, when): (recorded, words or None)
    for (what, when, recorded), words in _words(f"""
the client leaves | {BEFORE} | nothing |
the client leaves | {MIDDLE} | nothing |
the client leaves | {SENDING} | context only |
its session is finished | {BEFORE} | nothing | {_CLOSED}
its session is finished | {MIDDLE} | nothing | {_LATE}
its session is dropped | {BEFORE} | nothing | {_CLOSED}
its session is dropped | {MIDDLE} | nothing | {_LATE}
the engine fails | {MIDDLE} | nothing | engine_error api_error server_error UNAVAILABLE
the engine cuts the call short | {MIDDLE} | context only | \
engine_error overloaded_error server_error UNAVAILABLE
""")
}
TITLES = (
    "OpenAI Chat Completions",
    "Anthropic Messages",
    "OpenAI Responses",
    "Gemini generateContent",
)


@dataclass
class Answer:
    """A reply as the client library gives it, in words of no protocol."""

    end: str
    text: str
    reasoning: str | None
    # name and arguments of each call
    calls: list
    tokens: tuple[int, int]
    # to be sent back, and the ids of its calls
    echo: list = field(default_factory=list)
    ids: list = field(default_factory=list)


@dataclass
class Failure(Exception):
    """What the client library raises, in words of no protocol."""

    status: int
    word: str | None
    message: str


IMAGE = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


class Driver:
    """What asks in a protocol, with its official client; ``fields`` are of the body."""

    name: ClassVar[str]

    def client(self, session):
        return session.openai

    def user(self, text):
        return [saying(self.name, text)]

    def image(self):
        return [saying(self.name, image_part(self.name, "image/png", IMAGE))]


class Chat(Driver):
    name = "openai_chat"

    def failed(self, answer, text):
        return [tool(answer.ids[0], text)]

    async def ask(self, client, sent, *, stream, **fields):
        asked = {"model": "any", "messages": sent, "tools": TOOLS[self.name]}
        create = client.chat.completions.create
        try:
            if stream:
                state = ChatCompletionStreamState()
                fields["stream_options"] = {"include_usage": True}
                async for chunk in await create(
                    stream=True, extra_body=fields, **asked
                ):
                    state.handle_chunk(chunk)
                reply = state.current_completion_snapshot
            else:
                reply = await create(extra_body=fields, **asked)
        except openai.APIError as error:
            # an event of a stream has no status
            status = getattr(error, "status_code", None)
            raise Failure(status, error.code, error.message) from error
        choice = reply.choices[0]
        message = choice.message.model_dump(exclude_none=True)
        calls = choice.message.tool_calls or []
        return Answer(
            end=choice.finish_reason,
            text=choice.message.content or "",
            reasoning=message.get("reasoning_content"),
            calls=[(c.function.name, c.function.arguments) for c in calls],
            tokens=(reply.usage.prompt_tokens, reply.usage.completion_tokens),
            echo=[message],
            ids=[c.id for c in calls],
        )


class Anthropic(Driver):
    name = "anthropic"

    def client(self, session):
        return session.gateway.anthropic(session.key)

    def failed(self, answer, text):
        told = {"tool_use_id": answer.ids[0], "content": text, "is_error": True}
        return [user([{"type": "tool_result", **told}])]

    async def ask(self, client, sent, *, stream, **fields):
        asked = {"model": "any", "max_tokens": 10**6, "messages": sent}
        asked |= {"tools": TOOLS[self.name], "extra_body": fields}
        try:
            if stream:
                async with client.messages.stream(**asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(**asked)
        except anthropic.APIStatusError as error:
            body = error.body["error"]
            raise Failure(error.status_code, body["type"], body["message"]) from error
        thoughts = [b.thinking for b in reply.content if b.type == "thinking"]
        calls = [b for b in reply.content if b.type == "tool_use"]
        usage = reply.usage
        n_prompt = usage.input_tokens + usage.cache_read_input_tokens
        return Answer(
            end=reply.stop_reason,
            text="".join(b.text for b in reply.content if b.type == "text"),
            reasoning="".join(thoughts) or None,
            calls=[(b.name, b.input) for b in calls],
            tokens=(n_prompt, usage.output_tokens),
            echo=[said([b.model_dump(exclude_none=True) for b in reply.content])],
            ids=[b.id for b in calls],
        )


class Responses(Driver):
    name = "openai_responses"

    def failed(self, answer, text):
        kind = "function_call_output"
        return [{"type": kind, "call_id": answer.ids[0], "output": text}]

    async def ask(self, client, sent, *, stream, **fields):
        asked = {"model": "any", "input": sent, "extra_body": fields}
        asked["tools"] = [{**each, "strict": False} for each in TOOLS[self.name]]
        try:
            if stream:
                events = await client.responses.create(stream=True, **asked)
                reply = [event async for event in events][-1].response
            else:
                reply = await client.responses.create(**asked)
        except openai.APIStatusError as error:
            raise Failure(error.status_code, error.code, error.message) from error
        if reply.status == "failed":
            # the one failure that is told in the stream, where the status is gone
            raise Failure(400, reply.error.code, reply.error.message)
        if reply.status == "incomplete":
            assert reply.incomplete_details.reason == "max_output_tokens"
            assert reply.output[-1].status == "incomplete"
        thoughts = [i.content[0].text for i in reply.output if i.type == "reasoning"]
        calls = [item for item in reply.output if item.type == "function_call"]
        return Answer(
            end=reply.status,
            text=reply.output_text,
            reasoning="".join(thoughts) or None,
            calls=[(item.name, item.arguments) for item in calls],
            tokens=(reply.usage.input_tokens, reply.usage.output_tokens),
            echo=[item.model_dump(exclude_none=True) for item in reply.output],
            ids=[item.call_id for item in calls],
        )


class Gemini(Driver):
    name = "gemini"

    def client(self, session):
        return session.gateway.gemini(session.key).aio.models

    def failed(self, answer, text):
        result = {"id": answer.ids[0], "name": "f", "response": {"error": text}}
        return [saying(self.name, {"functionResponse": result})]

    async def ask(self, client, sent, *, stream, **fields):
        config = fields.pop("generationConfig", {}) | fields
        config |= {"tools": TOOLS[self.name]}
        config["automaticFunctionCalling"] = {"disable": True}
        asked = {
            "model": "any",
            "contents": [types.Content.model_validate(each) for each in sent],
            "config": types.GenerateContentConfig.model_validate(config),
        }
        parts = []
        try:
            if stream:
                async for reply in await client.generate_content_stream(**asked):
                    parts += reply.candidates[0].content.parts
            else:
                reply = await client.generate_content(**asked)
                parts = reply.candidates[0].content.parts
        except google.APIError as error:
            raise Failure(error.code, error.status, error.message) from error
        calls = [part.function_call for part in parts if part.function_call]
        texts = [part for part in parts if part.text]
        usage = reply.usage_metadata
        n_output = usage.candidates_token_count + (usage.thoughts_token_count or 0)
        return Answer(
            end=reply.candidates[0].finish_reason.name,
            text="".join(part.text for part in texts if not part.thought),
            reasoning="".join(part.text for part in texts if part.thought) or None,
            calls=[(call.name, call.args) for call in calls],
            tokens=(usage.prompt_token_count, n_output),
            echo=[types.Content(role="model", parts=parts)],
            ids=[call.id for call in calls],
        )


DRIVERS = {each.name: each for each in (Chat(), Anthropic(), Responses(), Gemini())}


# What a request may require of its reply: as the table shows it, the fields of the body
# of a request that offers the tool ``f``, and what is read from them. None: the protocol
# has no field for it.
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_NAMED = {"type": "function", "name": "f"}
_NESTED = {"type": "function", "function": {"name": "f"}}
_FORMAT = {"type": "json_schema", "schema": _SCHEMA}
_STRICT = {"name": "f", "strict": True}
_JSON = {"responseMimeType": "application/json"}


def _calling(**config):
    return {"toolConfig": {"functionCallingConfig": config}}


def _allowed(tool):
    return {"type": "allowed_tools", "mode": "auto", "tools": [tool]}


_PARALLEL = ("parallel_tool_calls: false", {"parallel_tool_calls": False})


def _choice(shown, **fields):
    return f"tool_choice: {shown}", {"tool_choice": fields or shown}


REQUIRED = {
    "a call": (
        {"call": True},
        _choice("required"),
        _choice("any", type="any"),
        _choice("required"),
        ("mode: ANY", _calling(mode="ANY")),
    ),
    "a call of one tool": (
        {"call": True, "names": ("f",)},
        _choice("function", **_NESTED),
        _choice("tool", type="tool", name="f"),
        _choice("function", **_NAMED),
        ("allowedFunctionNames", _calling(mode="ANY", allowedFunctionNames=["f"])),
    ),
    "calls of some tools only": (
        {"names": ("f",)},
        _choice("allowed_tools", type="allowed_tools", allowed_tools=_allowed(_NESTED)),
        None,
        _choice("allowed_tools", **_allowed(_NAMED)),
        ("allowedFunctionNames", _calling(mode="VALIDATED", allowedFunctionNames=["f"])),
    ),
    "one call at most": (
        {"parallel": False},
        _PARALLEL,
        ("disable_parallel_tool_use: true",
         {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        _PARALLEL,
        None,
    ),
    "arguments of the tool's schema": (
        {"strict": ["f"]},
        ("strict: true", {"tools": [{"type": "function", "function": _STRICT}]}),
        ("strict: true", {"tools": [{**_STRICT, "input_schema": {}}]}),
        ("strict: true", {"tools": [{**_STRICT, "type": "function"}]}),
        ("mode: VALIDATED", _calling(mode="VALIDATED")),
    ),
    "text that is a JSON object": (
        {"schema": {"type": "object"}},
        ("response_format: json_object", {"response_format": {"type": "json_object"}}),
        None,
        ("text.format: json_object", {"text": {"format": {"type": "json_object"}}}),
        ("responseMimeType: application/json", {"generationConfig": _JSON}),
    ),
    "text of a JSON schema": (
        {"schema": _SCHEMA},
        ("response_format: json_schema",
         {"response_format": {"type": "json_schema", "json_schema": _FORMAT}}),
        ("output_config.format: json_schema", {"output_config": {"format": _FORMAT}}),
        ("text.format: json_schema", {"text": {"format": _FORMAT}}),
        ("responseJsonSchema",
         {"generationConfig": {**_JSON, "responseJsonSchema": _SCHEMA}}),
    ),
}  # fmt: skip

_OTHER = {"type": "function", "function": {"name": "g"}}
# What a case asks for besides, by protocol.
ASKED = {
    "a stop string of the client": (
        {"stop": ["END"]},
        {"stop_sequences": ["END"]},
        {},
        {"generationConfig": {"stopSequences": ["END"]}},
    ),
    "a call that was required": [cell[1] for cell in REQUIRED["a call"][1:]],
    "a required tool that is not offered": (
        {"tool_choice": _OTHER},
        {"tool_choice": {"type": "tool", "name": "g"}},
        {"tool_choice": {"type": "function", "name": "g"}},
        _calling(mode="ANY", allowedFunctionNames=["g"]),
    ),
    "a parameter out of range": (
        *[{"temperature": 9.0}] * 3,
        {"generationConfig": {"temperature": 9.0}},
    ),
}


def each_of(table):
    """Run a test for each case and protocol that has a cell in a table."""
    given = [
        pytest.param(case, name, cell, id=f"{case}-{name}")
        for case, cells in table.items()
        for name, cell in zip(NAMES, cells, strict=True)
        if cell is not None
    ]
    return pytest.mark.parametrize(("case", "name", "cell"), given)


def _markdown(columns, rows) -> str:
    """A table: of each row, how it starts, and the word of each protocol."""
    lines = [f"| {columns} | {' | '.join(TITLES)} |"]
    lines.append("| --- |" + " --- |" * (columns.count("|") + len(TITLES)))
    for start, words in rows:
        cells = ["" if word is None else f"`{word}`" for word in words or [None] * 4]
        lines.append(f"| {start} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """The tables of ``docs/serving.md``, in Markdown."""
    cases = [(f"{case} | 200", words) for case, words in ENDS.items()]
    cases += [(f"{case} | {status}", w) for case, (status, w) in FAILURES.items()]
    cuts = [(f"{' | '.join(how)} | {log}", w) for how, (log, w) in CUTS.items()]
    forms = {
        what: [c and c[0] for c in cells] for what, (_, *cells) in REQUIRED.items()
    }
    return {
        "cases": _markdown("case | status", cases),
        "cuts": _markdown("what cuts it off | when | in the log", cuts),
        "required": _markdown("what is required", forms.items()),
    }


if __name__ == "__main__":
    import sys

    sys.stdout.write("\n".join(tables().values()))
