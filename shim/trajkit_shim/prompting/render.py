"""Chat messages to prompt ids, and sampled ids to text, with a tokenizer's own template.

A message cannot forge the structure of the prompt: text of messages and tools that
spells out a special token (``<|im_end|>``) is encoded as ordinary text. Added tokens that
are not special (``<think>``) are markup that models write themselves, so they are encoded
as the tokenizer does it. Everything here is safe to use from several threads at once.
"""

import json
import re
import secrets
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajkit_shim.chat.request import tool_call
from trajkit_shim.engines.checks import too_long
from trajkit_shim.errors import GatewayError, TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Encoded, Ids
from trajkit_shim.prompting.tokenize_cache import NO_LIMIT, TokenizeCache, encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_PROBE_TEXT = "lead"
_PROBE_ARGUMENTS = '{"probe":  1}'
# possible starts of a piece: some tokenizers treat the start of a text differently
_PROBE_PIECES = ("", " a\n", "a", "\n", "\u00e9 ", "  a", ".a")
# spelling of a token for one byte
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class ChatRenderer:
    """One fast tokenizer, whose ``eos_token`` ends a message, and its chat template.

    ``chat_template`` replaces the tokenizer's own; ``cache_bytes`` limits the cache of
    tokenized texts. Raises `ValueError`: there is no template, or no ``eos_token``.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        chat_template: str | None = None,
        *,
        cache_bytes: int = 256 << 20,
    ) -> None:
        from tokenizers import Tokenizer

        template = chat_template or tokenizer.chat_template
        if not isinstance(template, str):
            raise ValueError("the tokenizer has no chat template: give one")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token to end a message with")
        self.tokenizer = tokenizer
        self.chat_template = template
        self.end_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self._backend = tokenizer.backend_tokenizer
        plain = Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        self._piece = TokenizeCache(plain, cache_bytes)
        self._special = {
            token.content: Encoded(
                np.array([token_id], np.int32),
                np.array([[0, len(token.content)]], np.int32),
            )
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        # the empty alternation would match everywhere
        spelled = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelled = re.compile(f"({spelled})")
        # breaks up special tokens within text; unpredictable for clients
        self._mark = f"x{secrets.token_hex(12)}x"
        self._longest = _longest_token(self._backend)
        # texts are tokenized piece by piece
        self.keeps_apart = True
        self.keeps_apart = self._split_agrees()
        if not self.keeps_apart:
            self._piece = TokenizeCache(self._backend, cache_bytes)
        self._probe_template()
        self._end_of_reasoning: int | None = self._backend.token_to_id("</think>")
        # Ids for single bytes. A run of them can only be decoded at its end, because one
        # byte that is not UTF-8 makes the entire run unreadable.
        self.byte_ids: frozenset[int] = frozenset()
        if '"ByteFallback"' in self._backend.to_str():
            words = self._backend.get_vocab(with_added_tokens=False).items()
            self.byte_ids = frozenset(id for word, id in words if _BYTE.fullmatch(word))

    def text(
        self,
        messages: list[Json],
        tools: list[Json] | None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text, with a mark inside special tokens that are text.

        Messages are canonical (`trajkit_shim.chat.request`), tools in OpenAI's format.
        Raises `TemplateError`: the template rejects the messages. `GatewayError`: a
        text spells out a special token that this tokenizer cannot encode as text.
        """
        from jinja2.exceptions import TemplateError as JinjaError

        if not self._takes_late_system:
            messages = _one_system(messages)
        shaped = [*map(self._for_template, messages)]
        # a template is a program that runs on untrusted values; these are its failures
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._break(shaped),
                    tools=self._break(tools),
                    chat_template=self.chat_template,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                )
            )
        except (
            JinjaError,
            TypeError,
            ValueError,
            LookupError,
            RecursionError,
        ) as error:
            message = f"the chat template rejects the messages: {error}"
            raise TemplateError(message, code="chat_template") from error

    def without_mark(self, text: str) -> str:
        """Return a part of `text` with the marks removed."""
        return text.replace(self._mark, "")

    def end_of_message(self, text: str, start: int) -> tuple[int, int] | None:
        """Return start and stop of the first end-of-message token from ``start`` on."""
        for match in self._spelled.finditer(text, start):
            if self._special[match.group()].ids[0] in self.end_ids:
                return match.span()
        return None

    def decode(self, output_ids: Ids, *, ended: bool) -> str:
        """Return the text of sampled ids, without a final end if the model ``ended`` it."""
        ids = output_ids.tolist()
        if ended and ids and ids[-1] in self.end_ids:
            ids.pop()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def opens_reasoning(self, prompt_ids: Ids) -> bool:
        """Return whether a prompt ends within the reply's reasoning."""
        # "<think>\n" in single bytes, and a few more
        return self.decode(prompt_ids[-16:], ended=False).rstrip().endswith("<think>")

    def end_of_reasoning(self, output_ids: Ids) -> int | None:
        """Return how many sampled ids the reasoning has with its end token, if any."""
        ends = np.flatnonzero(output_ids == self._end_of_reasoning)
        return int(ends[0]) + 1 if len(ends) else None

    def _break(self, value: Any) -> Any:
        """A JSON value with the mark inside each special token that it spells out."""
        if isinstance(value, dict):
            return {self._break(key): self._break(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._break(item) for item in value]
        while isinstance(value, str) and self._spelled.search(value):
            if not self.keeps_apart:
                raise GatewayError(
                    "a message or tool spells out a special token, which this model's "
                    "tokenizer cannot encode as text",
                    code="special_token_in_text",
                )
            value = self._spelled.sub(
                lambda token: token[0][0] + self._mark + token[0][1:], value
            )
        return value

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise `EngineError` for a text that is too long whatever its tokens."""
        n_tokens = len(text) // self._longest
        if n_tokens > max_tokens:
            raise too_long(n_tokens, max_tokens, "at least ")

    def encode(self, text: str, max_tokens: int = NO_LIMIT) -> Encoded:
        """Tokenize a `text`, with the characters of each id after `without_mark`."""
        self.check_length(self.without_mark(text), max_tokens)
        ids, offsets, length = list[Ids](), list[npt.NDArray[np.int32]](), 0
        parts = self._spelled.split(text) if self.keeps_apart else [text]
        for part in parts:
            plain = self.without_mark(part)
            piece = self._special.get(part) or self._piece(plain, max_tokens)
            ids.append(piece.ids)
            offsets.append(piece.offsets + length)
            length += len(plain)
        return Encoded(np.concatenate(ids), np.concatenate(offsets))

    def _split_agrees(self) -> bool:
        """Whether the pieces between special tokens have the ids of the complete text."""
        texts = (begins.join(["", *self._special, ""]) for begins in _PROBE_PIECES)
        return all(len(token) > 1 for token in self._special) and all(
            self.encode(text).ids.tolist() == encode(self._backend, text).ids.tolist()
            for text in texts
        )

    def _for_template(self, message: Json) -> Json:
        """The message in the form that this template renders closest to the sample."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self._keeps_markup and "sampled" in message:
            # text after a call, which no template would write there
            plain = {k: v for k, v in message.items() if k != "tool_calls"}
            return {**plain, "content": message["sampled"]}
        assert isinstance(calls, list)
        content = str(message["content"])
        separator = self._call_separator
        if separator and content.endswith(separator) and content != separator:
            # the template adds the separator itself
            content = content.removesuffix(separator)
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
        """Find out what the template does with calls and late system messages."""
        # until this is known, messages are rendered as they are
        self._takes_string = self._takes_late_system = True
        self._keeps_markup, self._call_separator = False, ""
        user: Json = {"role": "user", "content": "user"}

        def shown(*messages: Json) -> str:
            # the template rejects it, or the tokenizer a special token within text
            with suppress(GatewayError):
                return self.text([user, *messages], None)
            return ""

        call = tool_call("call_0", "probe", _PROBE_ARGUMENTS)
        reply: Json = {"role": "assistant", "content": _PROBE_TEXT}
        text = shown({**reply, "tool_calls": [call]})
        self._takes_string = _PROBE_ARGUMENTS in text  # arguments may be strings
        # the white space before a call
        between = text.partition("<tool_call>")[0].rpartition(_PROBE_TEXT)[2]
        self._call_separator = between if between.isspace() else ""
        # a call in an assistant message's text is rendered unchanged
        markup = f"<tool_call>\n{_PROBE_ARGUMENTS}\n</tool_call>"
        markup = f"{_PROBE_TEXT}{markup} {_PROBE_TEXT}"
        result: Json = {"role": "tool", "content": "tool", "tool_call_id": "call_0"}
        self._keeps_markup = markup in shown({**reply, "content": markup}, result)
        # a system message is allowed after other messages
        late = f"{_PROBE_TEXT}2"
        system: Json = {"role": "system", "content": late}
        self._takes_late_system = late in shown(reply, system, user)


def _longest_token(tokenizer: "Tokenizer") -> int:
    """The most characters that one token covers, if the tokenizer bounds it."""
    parts = json.loads(tokenizer.to_str())
    model, normalizer = parts["model"], parts["normalizer"]
    swallows = any(
        token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]
    )
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


def _one_system(messages: list[Json]) -> list[Json]:
    """Join leading system messages, and make later ones reminders by the user."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    adapted: list[Json] = []
    if leading:
        text = "\n\n".join(str(message["content"]) for message in leading)
        adapted.append({"role": "system", "content": text})
    for message in messages[len(leading) :]:
        if message["role"] == "system":
            text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            message = {"role": "user", "content": text}
        adapted.append(message)
    return adapted


def load_renderer(path: str | Path, chat_template: str | None = None) -> ChatRenderer:
    """Return the renderer for a model directory's tokenizer. Downloads nothing.

    Raises `FileNotFoundError`: there is no such directory. `ValueError`: it has no fast
    tokenizer, no chat template, or no end-of-message token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(path).is_dir():
        raise FileNotFoundError(f"no model directory {str(path)!r}")
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of {str(path)!r} is not a fast one")
    return ChatRenderer(tokenizer, chat_template)
