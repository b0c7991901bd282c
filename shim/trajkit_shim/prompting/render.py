"""Chat messages to prompt ids, and sampled ids to text, with a model's own template.

A message cannot forge the structure of the prompt: text that spells out a token of the
added vocabulary (``<|im_end|>``, ``<tool_call>``) is encoded as ordinary text. In a reply
that was sampled this holds for special tokens only, because markup such as
``<tool_call>`` is what the model itself wrote. Everything here is safe to use from
several threads at once.
"""

import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, takewhile
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from trajkit_shim.chat.request import (
    Thought,
    ToolCall,
    assistant_message,
    function_tool,
    squeezed,
    tool_message,
)
from trajkit_shim.engines.checks import too_long
from trajkit_shim.engines.model_config import read_config
from trajkit_shim.errors import GatewayError, TemplateError
from trajkit_shim.json_input import HALF, Json

NO_LIMIT = 2**31 - 1
"""More tokens than any text has."""

Ids: TypeAlias = npt.NDArray[np.int32]

LateSystem: TypeAlias = Literal["user", "refuse"]
"""What to do with a system message after other messages, if the template refuses it:
show it as a reminder by the user, or reject the request with 400."""

# possible starts of a piece: some tokenizers treat the start of a text differently
_PROBE_PIECES = ("", " a\n", "a", "\n", "\u00e9 ", "  a", ".a")
# what every template is given; a client cannot set it
_GIVEN = frozenset("messages tools documents add_generation_prompt".split())
_TYPED: Json = {"key": {"type": "integer", "description": "key"}}
PROBE = function_tool("probe", "probe", {"type": "object", "properties": _TYPED})
"""A tool with which templates are tried out."""

# the special tokens that have a name, which templates use
_NAMED = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
# the keys under which templates look for the reasoning of a reply
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SHORT = 1 << 12  # characters of a text that takes about a millisecond
_LONG = 1 << 17  # characters of a text that takes tens of milliseconds
# short texts do not wait for the processors that long ones use
_long_texts = BoundedSemaphore(max(1, (os.cpu_count() or 1) // 2))


@dataclass(slots=True)
class ModelTokenizer:
    """A fast tokenizer, its templates, and the texts of its named special tokens."""

    backend_tokenizer: Tokenizer
    chat_template: "str | dict[str, str] | None"
    special_tokens_map: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.backend_tokenizer.get_vocab_size())


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A text's ids, and the characters each of them covers, if they were asked for."""

    ids: Ids
    # shape (n_ids, 2): characters offsets[i, 0]:offsets[i, 1]
    offsets: Ids | None = None


class ChatRenderer:
    """One fast tokenizer, the tokens that end a reply, and a chat template.

    ``tokenizer``: a `ModelTokenizer`, or one of transformers. ``chat_template`` replaces
    the tokenizer's own, ``end_ids`` are tokens besides its ``eos_token`` that end a reply,
    and ``late_system`` is used where the template refuses a late system message. Raises
    `ValueError`: there is no template, or no token ends a reply.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        end_ids: Iterable[int] = (),
        late_system: LateSystem = "user",
    ) -> None:
        template = chat_template or tokenizer.chat_template
        if isinstance(template, dict):
            # named templates; the one for tools is complete
            template = template.get("tool_use") or template.get("default")
        if not isinstance(template, str):
            raise ValueError("the tokenizer has no chat template: give --chat-template")
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        named = tokenizer.special_tokens_map.items()
        self._names = {name: text for name, text in named if isinstance(text, str)}
        own = self._backend.token_to_id(self._names.get("eos_token", ""))
        self.end_ids = (*dict.fromkeys([*([] if own is None else [own]), *end_ids]),)
        if not self.end_ids:
            raise ValueError(
                "no token ends a reply: neither the tokenizer, generation_config.json "
                "nor config.json names an eos token: give --stop-token"
            )
        self.tokenizer, self.chat_template = tokenizer, template
        self.late_system = late_system
        room = _Sandbox()
        try:
            used = meta.find_undeclared_variables(room.parse(template))
            self._compiled = room.from_string(template)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template, line {error.lineno}: {error}"
            ) from error
        # those that a request or session may set
        self.variables = used - _GIVEN - {*room.globals, *self._names}
        added = self._backend.get_added_tokens_decoder().items()
        self.text_of_id = {i: token.content for i, token in added}
        self._added = {text: i for i, text in self.text_of_id.items()}
        special = {t.content for i, t in added if t.special or i in self.end_ids}
        # patterns of control tokens; white space that has a token of its own is text
        self.special, self._pieces = _any_of(special), _any_of(self._added)
        self.control = _any_of([t for t in self._added if t.strip(" \t\n\r\u2581")])
        # the control tokens that end a reply
        self.end_tokens = frozenset(
            t for t, i in self._added.items() if i in self.end_ids
        )
        parts = json.loads(self._backend.to_str())
        # for text: without the added vocabulary
        plain = {**parts, "added_tokens": [], "post_processor": None}
        self._plain = Tokenizer.from_str(json.dumps(plain))
        # breaks up control tokens within text; unpredictable for clients
        self._mark = f"x{secrets.token_hex(12)}x"
        self._longest = _longest_token(self._backend, parts)
        # texts are tokenized piece by piece
        self.keeps_apart = True
        self.keeps_apart = self._split_agrees()
        read = self.decode(self.encode("a word").ids, ended=False)
        if read.strip() != "a word":
            message = f"the tokenizer reads 'a word' back as {read!r}"
            raise ValueError(f"{message}: put the model's own tokenizer.json there")
        self._probe_template()

    def text(
        self,
        messages: Sequence[Json],
        tools: list[Json] | None,
        variables: Mapping[str, object] | None = None,
        *,
        sampled: Collection[int] = (),
    ) -> str:
        """Return the prompt's text, with a mark inside control tokens that are text.

        Messages are canonical (`trajkit_shim.chat.request`), tools in OpenAI's format;
        ``sampled``: indices of messages that are sampled replies. Raises as `render`.
        """
        shaped = [self.shape(m, sampled=i in sampled) for i, m in enumerate(messages)]
        return self.render(shaped, *map(self.as_text, (tools, dict(variables or {}))))

    def as_text(self, value: Any) -> Any:
        """Return a JSON value as the template takes it; raises as `shape`."""
        return self._break(value, self.control)

    def shape(self, message: Json, *, sampled: bool = False) -> Json:
        """Return a message as the template takes it.

        Raises `GatewayError`: a text spells out a control token that this tokenizer
        cannot encode as text.
        """
        spelled = self.special if sampled else self.control
        shaped: Json = self._break(self._for_template(message), spelled)
        return shaped

    def render(
        self,
        shaped: Sequence[Json],
        tools: list[Json] | None,
        variables: Mapping[str, object],
    ) -> str:
        """Return the text of messages of `shape`, and tools and variables of `as_text`.

        Raises `TemplateError`: the template rejects them; and as `shape`.
        """
        if not self.takes_late_system:
            shaped = self._one_system(shaped)
        try:
            text = self._compiled.render(
                **self._names,
                **variables,
                messages=shaped,
                tools=tools,
                add_generation_prompt=True,
            )
        # the template is a program, on untrusted values
        except (
            JinjaError,
            TypeError,
            ValueError,
            LookupError,
            RecursionError,
        ) as error:
            message = f"the chat template rejects the messages: {error}"
            raise TemplateError(message, code="chat_template") from error
        # as a model or a client can spell it; no tokenizer has half a character
        with suppress(UnicodeEncodeError):
            if not text.isascii():
                text.encode()
            return text
        return HALF.sub("\ufffd", text)

    def takes(self, name: str, value: object) -> bool:
        """Return whether the template has a variable, and does not refuse a value."""
        if name in self.variables:
            with suppress(GatewayError):
                self.text([{"role": "user", "content": "user"}], None, {name: value})
                return True
        return False

    def without_mark(self, text: str) -> str:
        """Return a part of `text` with the marks removed."""
        return text.replace(self._mark, "")

    def decode(self, output_ids: Ids, *, ended: bool) -> str:
        """Return the text of sampled ids, without a final end if the model ``ended`` it."""
        ids = output_ids.tolist()
        if ended and ids and ids[-1] in self.end_ids:
            ids.pop()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def n_until(self, output_ids: Ids, token: str) -> int:
        """Return how many ids there are up to the first of a token; 0: it is not there."""
        found = np.flatnonzero(output_ids == self._added.get(token, -1))
        return int(found[0]) + 1 if len(found) else 0

    def _break(self, value: Any, spelled: re.Pattern[str]) -> Any:
        """A JSON value with the mark inside each control token that it spells out."""
        if isinstance(value, dict):
            return {
                self._break(key, spelled): self._break(item, spelled)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._break(item, spelled) for item in value]
        while isinstance(value, str) and spelled.search(value):
            if not self.keeps_apart:
                raise GatewayError(
                    "a message or tool spells out a special token, which this model's "
                    "tokenizer cannot encode as text",
                    code="special_token_in_text",
                )
            value = spelled.sub(lambda t: t[0][0] + self._mark + t[0][1:], value)
        return value

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise `EngineError` for a text that is too long whatever its tokens."""
        n_tokens = len(text) // self._longest
        if n_tokens > max_tokens:
            raise too_long(n_tokens, max_tokens, "at least ")

    def encode(
        self, text: str, max_tokens: int = NO_LIMIT, *, offsets: bool = False
    ) -> Encoded:
        """Tokenize a `text`; ``offsets`` are in what `without_mark` returns for it."""
        self.check_length(self.without_mark(text), max_tokens)
        if not self.keeps_apart:
            return encode(self._backend, text, max_tokens, offsets=offsets)
        ids, sides, length = list[Ids](), list[Ids](), 0
        for part in self._pieces.split(text):
            token, plain = self._added.get(part), self.without_mark(part)
            if token is None:
                piece = encode(self._plain, plain, max_tokens, offsets=offsets)
            else:
                whole = np.array([[0, len(part)]], np.int32)
                piece = Encoded(np.array([token], np.int32), whole)
            ids.append(piece.ids)
            if offsets and piece.offsets is not None:
                sides.append(piece.offsets + length)
                length += len(plain)
        return Encoded(np.concatenate(ids), np.concatenate(sides) if sides else None)

    def _split_agrees(self) -> bool:
        """Whether the pieces between control tokens have the ids of the complete text."""
        texts = (begins.join(["", *self._added, ""]) for begins in _PROBE_PIECES)
        # a mark has room within each of them
        marked = all(len(token) > 1 for token in self._added if token.strip())
        return marked and all(
            self.encode(text).ids.tolist() == encode(self._backend, text).ids.tolist()
            for text in texts
        )

    def _for_template(self, message: Json) -> Json:
        """The message in the form that this template renders closest to the sample."""
        if message["role"] != "assistant":
            return message
        calls, thought = message.get("tool_calls"), message.get("reasoning_content")
        if thought:
            message = {**message, **dict.fromkeys(_THOUGHTS, thought)}
            if self._takes_chunks and not calls:
                chunks = [{"type": "thinking", "thinking": thought}]
                chunks.append({"type": "text", "text": message["content"]})
                return {**message, "content": chunks}
        if not calls:
            return message
        assert isinstance(calls, list)
        content, separator = str(message["content"]), self._call_separator
        if content != separator:
            # the template adds the separator itself
            content = content.removesuffix(separator)
        if thought and content and self._one_text_beside_calls:
            message = {**message, **dict.fromkeys(_THOUGHTS, f"{thought}\n{content}")}
            content = ""
        shaped = []
        for call in calls:
            function = {**call["function"]}
            # invalid JSON stays text
            with suppress(ValueError, RecursionError):
                if not self._takes_string:
                    function["arguments"] = json.loads(function["arguments"] or "{}")
            shaped.append({**call, "function": function})
        return {**message, "content": content, "tool_calls": shaped}

    def _probe_template(self) -> None:
        """Find out in which form the template takes replies, calls and their results."""
        # until this is known, messages are rendered as they are
        self._takes_string = self.takes_late_system = True
        self._one_text_beside_calls = self._takes_chunks = False
        self._call_separator, arguments = "", '{"probe":  1}'
        user: Json = {"role": "user", "content": "user"}

        def shown(*messages: Json, tools: list[Json] | None = None) -> str:
            # the template rejects it, or the tokenizer a special token within text
            with suppress(GatewayError):
                return self.text([user, *messages], tools)
            return ""

        # what a request offers
        self.shows_tools = shown(tools=[PROBE]) not in ("", shown())

        def calling(call_id: str, content: str = "", thought: str = "") -> str:
            call = ToolCall("probe", arguments, call_id)
            reply = assistant_message([Thought(thought), content, call])
            return shown(reply, tool_message(call_id, ["tool"]))

        text = calling("call00000", "lead")
        self._takes_string = False
        parsed = calling("call00000", "lead")
        # arguments may be strings, unless the template writes an object in another way
        # than a string; quotes are those of a template that cannot write JSON
        alike = squeezed(parsed).replace("'", '"') in ("", squeezed(text))
        if arguments in text and alike:
            self._takes_string = True
        else:
            text = parsed
        # ids of calls: some templates want nine letters and digits
        self.short_call_ids = bool(text) and not calling("call_0000000000")
        # the white space before a call
        between = text.partition("<tool_call>")[0].rpartition("lead")[2]
        self._call_separator = between if between.isspace() else ""
        # text and reasoning beside a call are refused
        both = calling("call00000", "lead", "thought")
        self._one_text_beside_calls = bool(text) and not both
        # reasoning is a part of the content
        if "'thinking'" in self.chat_template:
            thinks = assistant_message([Thought("lead3"), "text"])
            apart = "lead3" in shown(thinks)
            self._takes_chunks = True
            self._takes_chunks = not apart and "lead3" in shown(thinks)
        # a system message is allowed after other messages
        system: Json = {"role": "system", "content": "lead2"}
        late = shown(assistant_message(["lead"]), system, user)
        self.takes_late_system = "lead2" in late

    def _one_system(self, messages: Sequence[Json]) -> list[Json]:
        """Join leading system messages, and make later ones reminders by the user."""
        leading = [*takewhile(lambda m: m["role"] == "system", messages)]
        adapted: list[Json] = []
        if leading:
            text = "\n\n".join(str(message["content"]) for message in leading)
            adapted.append({"role": "system", "content": text})
        for message in messages[len(leading) :]:
            if message["role"] == "system":
                if self.late_system == "refuse":
                    raise TemplateError(
                        "the chat template takes no system message after other "
                        "messages (--late-system user shows it as a reminder)",
                        code="late_system_message",
                    )
                text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
                message = {"role": "user", "content": text}
            adapted.append(message)
        return adapted


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """A pattern of any of some texts, in a group; the longest one matches."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    # the empty alternation would match everywhere
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _public(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if not name.startswith("_"))


# what a dict has as attributes; other names can only be keys
_DICT = frozenset(dir(dict))
# attributes that the sandbox returns as they are
_SAFE = {
    str: _public(str) - {"format", "format_map"},
    LoopContext: _public(LoopContext),
}
_plain_json = json.JSONEncoder(ensure_ascii=False).encode


class _Generation(Extension):
    """The block ``generation``, which marks replies; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """That of transformers, with less work for what templates look up most."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _as_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
        if type(function) is Macro:
            # the template's own; the names are those of jinja
            named.pop("_loop_vars", None)
            named.pop("_block_vars", None)
            return function(*args, **named)
        return super().call(context, function, *args, **named)


def _refuse(message: str) -> None:
    raise JinjaError(message)


def _as_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    if not (ensure_ascii or options):
        return _plain_json(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def encode(
    tokenizer: Tokenizer,
    text: str,
    max_tokens: int = NO_LIMIT,
    *,
    offsets: bool = False,
) -> Encoded:
    """Tokenize a text without special tokens; other threads run meanwhile."""
    if len(text) <= _SHORT:
        # another thread would take longer to wake up than this takes
        encoded = tokenizer.encode(text, add_special_tokens=False)
    else:
        with _long_texts if len(text) > _LONG else nullcontext():
            # unlike encode, this releases the interpreter
            (encoded,) = tokenizer.encode_batch([text], add_special_tokens=False)
    n_tokens = len(encoded)
    if n_tokens > max_tokens:
        # the error's traceback would keep it until a garbage collection, in which freeing
        # it would halt all threads
        del encoded
        raise too_long(n_tokens, max_tokens, "at least ")
    ids = np.array(encoded.ids, np.int32)
    if not offsets:
        return Encoded(ids)
    sides = chain.from_iterable(encoded.offsets)
    return Encoded(ids, np.fromiter(sides, np.int32, 2 * n_tokens).reshape(-1, 2))


def _longest_token(tokenizer: Tokenizer, parts: dict[str, Any]) -> int:
    """The most characters that one token covers, if the tokenizer bounds it."""
    model, normalizer = parts["model"], parts["normalizer"]
    swallows = any(t["lstrip"] or t["rstrip"] for t in parts["added_tokens"])
    # an unknown token may cover several characters, and a normalizer may remove some
    bounded = (
        model["type"] == "BPE"
        and not model.get("fuse_unk")
        and not swallows
        and (normalizer is None or normalizer["type"] == "NFC")
    )
    # NFC joins at most three characters
    factor = 1 if normalizer is None else 3
    return factor * max(map(len, tokenizer.get_vocab())) if bounded else NO_LIMIT


# The files of a model


def embedded_renderer() -> ChatRenderer:
    """Return the renderer for the embedded engine."""
    from trajkit_shim.engines import embedded

    tokenizer, template = embedded.chat_files()
    names = {"eos_token": embedded.END, "pad_token": "<|endoftext|>"}
    return ChatRenderer(ModelTokenizer(tokenizer, template, names))


def load_renderer(
    path: str | Path,
    chat_template: str | None = None,
    *,
    stop_tokens: Sequence[str] = (),
    trust_remote_code: bool = False,
    late_system: LateSystem = "user",
) -> ChatRenderer:
    """Return the renderer for a model directory's tokenizer. Downloads nothing.

    The tokens that end a reply are those of the tokenizer, of ``generation_config.json``
    and of ``config.json``, and ``stop_tokens``. Raises `FileNotFoundError`: there is no
    such directory. `ValueError`: it has no fast tokenizer, no chat template, or no
    end-of-message token.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"no model directory {str(path)!r}")
    tokenizer: Any
    if (folder / "tokenizer.json").exists() and not trust_remote_code:
        tokenizer = _load_tokenizer(folder)
    else:
        tokenizer = _from_transformers(folder, trust_remote_code)
    ends = [*_configured_ends(folder)]
    for token in stop_tokens:
        token_id = tokenizer.backend_tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"--stop-token {token}: no token of this tokenizer")
        ends.append(token_id)
    made = ChatRenderer(tokenizer, chat_template, end_ids=ends, late_system=late_system)
    ask: Json = {"role": "user", "content": "ask7031"}
    with suppress(GatewayError):
        if made.text([ask, assistant_message(["so"]), ask], None).count("7031") < 2:
            raise ValueError("the chat template does not show each message of a user")
    return made


def _load_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer of a directory that has a ``tokenizer.json``."""
    names = ("special_tokens_map.json", "tokenizer_config.json", "chat_template.json")
    special, config, template = (read_config(folder / name) for name in names)
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # tokenizers has no errors of its own
    except Exception as error:
        raise ValueError(f"tokenizer.json: {error}") from error
    texts: dict[str, str] = {}
    for name in _NAMED:
        token = {**special, **config}.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    missing = [t for t in texts.values() if backend.token_to_id(t) is None]
    backend.add_special_tokens([AddedToken(text, special=True) for text in missing])
    own = {**config, **template}.get("chat_template")
    if isinstance(own, list):
        own = {each["name"]: each["template"] for each in own}
    # as in named templates, the one for tools is complete
    files = "additional_chat_templates/tool_use.jinja", "chat_template.jinja"
    found = [folder / name for name in files if (folder / name).exists()]
    return ModelTokenizer(backend, found[0].read_text("utf-8") if found else own, texts)


def _from_transformers(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory whose files only transformers can read."""
    missing, found = "", list[str]()
    if not (folder / "tokenizer.json").exists():
        kinds = ("tekken.json", "tiktoken.model", "tokenizer.model", "*.tiktoken")
        found = sorted(file.name for kind in kinds for file in folder.glob(kind))
        only = f", only {', '.join(found)}" if found else ""
        code = "" if trust_remote_code else ", or give --trust-remote-code for its code"
        missing = f"there is no tokenizer.json{only}: put the model's own there{code}. "
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        rule = "this tokenizer needs transformers: pip install transformers"
        raise ValueError(f"{missing}{rule}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # transformers fails in as many ways as there are kinds of tokenizers
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{missing}the tokenizer: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{missing}the tokenizer is not a fast one")
    guessed = type(tokenizer).__module__.startswith("transformers.")
    if guessed and any("tiktoken" in file for file in found):
        raise ValueError(f"{missing}a tiktoken file does not say how text is split")
    return tokenizer


def _configured_ends(folder: Path) -> Iterable[int]:
    """Yield the ids that end a reply by the files of a model directory."""
    for name in ("generation_config.json", "config.json"):
        config = read_config(folder / name)
        inner = config.get("text_config")
        for part in (config, inner if isinstance(inner, dict) else {}):
            ids = part.get("eos_token_id")
            for token_id in ids if isinstance(ids, list) else [ids]:
                if isinstance(token_id, int):
                    yield token_id
                elif token_id is not None:
                    raise ValueError(f"{name}: eos_token_id {token_id!r}: not an id")
