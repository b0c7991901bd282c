"""Chat messages to prompt ids, and sampled ids to text, with a tokenizer's own template.

A message cannot forge the structure of the prompt. The text of messages and tools may
spell out a special token (``<|im_end|>`` in a file that a tool read). Such text is
encoded as ordinary text; only what the template itself writes becomes a control id.
Added tokens that are not special (``<think>``, ``<tool_call>``) are markup that models
write themselves, so they are encoded as the tokenizer does it.

Everything here is safe to use from several threads at once.
"""

import json
import re
import secrets
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from trajkit_shim.errors import GatewayError, TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Attribution, Encoded, attribute
from trajkit_shim.prompting.tokenize_cache import TokenizeCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids: TypeAlias = npt.NDArray[np.int32]

_NOWHERE = np.empty(0, np.int64)
_PROBE_TEXT = "lead"
_PROBE_ARGUMENTS = '{"probe":  1}'
# possible starts of a piece: some tokenizers treat the start of a text differently
_PROBE_PIECES = ("", " a\n", "a", "\n", "\u00e9 ", "  a", ".a")


# spelling of a token for one byte
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class ChatRenderer:
    """One tokenizer and its chat template.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        A fast tokenizer. Its ``eos_token`` ends an assistant message.
    chat_template : str, optional
        Used instead of the tokenizer's own template.
    cache_bytes : int
        Size of the cache of tokenized texts (`prompting.tokenize_cache`).

    Raises
    ------
    ValueError
        There is no template, or no token that ends a message.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        chat_template: str | None = None,
        *,
        cache_bytes: int = 256 << 20,
    ) -> None:
        from tokenizers import Tokenizer

        self._template = chat_template or tokenizer.chat_template
        if not isinstance(self._template, str):
            raise ValueError("the tokenizer has no chat template: give one")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token to end a message with")
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._plain = Tokenizer.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        self._special = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._spelling = {
            token_id: content for content, token_id in self._special.items()
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        # the empty alternation would match everywhere
        spelled = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelled = re.compile(spelled)
        # common prefix of all special tokens, quicker to search for than any of them
        self._lead = _lead_of(longest_first)
        # breaks up special tokens within text; unpredictable for clients
        self._mark = f"x{secrets.token_hex(12)}x"
        self._piece = TokenizeCache(self._plain, cache_bytes)
        self.keeps_apart = self._split_agrees()
        self._takes_string, self._call_separator = self._probe_template()
        self._keeps_markup = self._probe_markup()
        self._takes_late_system = self._probe_late_system()
        self._end_of_reasoning: int | None = self._backend.token_to_id("</think>")
        self.end_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        # Ids for single bytes. A run of them can only be decoded at its end, because one
        # byte that is not UTF-8 makes the entire run unreadable.
        self.byte_ids: frozenset[int] = frozenset()
        if '"ByteFallback"' in self._backend.to_str():
            vocabulary = self._backend.get_vocab(with_added_tokens=False)
            self.byte_ids = frozenset(
                id for word, id in vocabulary.items() if _BYTE.fullmatch(word)
            )

    @property
    def n_tokens(self) -> int:
        """The tokenizer's largest id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer."""
        return self._tokenizer

    @property
    def chat_template(self) -> str:
        """The text of the template."""
        return self._template

    def render(self, messages: list[Json], tools: list[Json] | None) -> Ids:
        """Return the ids of the prompt for the next assistant message.

        Parameters
        ----------
        messages : list of dict
            Canonical chat messages (`trajkit_shim.chat.request`).
        tools : list of dict or None
            Tool definitions in OpenAI's format.

        Returns
        -------
        ndarray of int32, shape (n_prompt,)

        Raises `TemplateError`: the template rejects the messages. `GatewayError`: a
        text spells out a special token that this tokenizer cannot encode as text.
        """
        return self.ids_of(self.text(messages, tools))

    def attribute(
        self, messages: list[Json], tools: list[Json] | None, prompt_ids: Ids
    ) -> Attribution | None:
        """Return which message each prompt token belongs to, or None if unknown.

        ``messages`` and ``tools`` are those that ``prompt_ids`` were rendered from.
        """
        try:
            return attribute(
                messages,
                prompt_ids,
                text_of=lambda marked: self.text(marked, tools),
                encode=self.encode,
                special=list(self._special.values()),
            )
        except TemplateError:
            # the template rejects the marks
            return None

    def text(
        self,
        messages: list[Json],
        tools: list[Json] | None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text, with a mark inside special tokens that are text.

        Raises as `render`.
        """
        if not self._takes_late_system:
            messages = _one_system(messages)
        shaped = [self._for_template(message) for message in messages]
        context = {"messages": shaped, "tools": tools}
        if self.spells_special(context):
            if not self.keeps_apart:
                raise GatewayError(
                    "a message or tool spells out a special token, which this model's "
                    "tokenizer cannot encode as text",
                    code="special_token_in_text",
                )
            broken = self._break(context)
            assert isinstance(broken, dict)
            shaped, tools = broken["messages"], broken["tools"]
        return self._apply(shaped, tools, generation_prompt)

    def without_mark(self, text: str) -> str:
        """Return a part of `text` with the marks removed."""
        return text.replace(self._mark, "")

    def end_of_message(self, text: str, start: int) -> tuple[int, int] | None:
        """Return start and stop of the first end-of-message token from ``start`` on."""
        for match in self._spelled.finditer(text, start):
            if self._special[match.group()] in self.end_ids:
                return match.span()
        return None

    def decode(self, output_ids: Ids, *, ended: bool) -> str:
        """Return the text of sampled ids, special tokens spelled out.

        With ``ended`` the model ended the message, and a final end-of-message id is
        dropped.
        """
        ids = output_ids.tolist()
        if ended and ids and ids[-1] in self.end_ids:
            ids.pop()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def opens_reasoning(self, prompt_ids: Ids) -> bool:
        """Return whether a prompt ends within the reply's reasoning."""
        # "<think>\n" in single bytes, and a few more
        tail = self._backend.decode(
            prompt_ids[-16:].tolist(), skip_special_tokens=False
        )
        return str(tail).rstrip().endswith("<think>")

    def end_of_reasoning(self, output_ids: Ids) -> int | None:
        """Return how many sampled ids the reasoning has, including its end token.

        None: there is no end token.
        """
        if self._end_of_reasoning is None:
            return None
        ends = np.flatnonzero(output_ids == self._end_of_reasoning)
        return int(ends[0]) + 1 if len(ends) else None

    def _apply(
        self,
        messages: list[Json],
        tools: list[Json] | None,
        generation_prompt: bool = True,
    ) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    cast("list[dict[str, str]]", messages),
                    tools=cast("list[Any] | None", tools),
                    chat_template=self._template,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                )
            )
        # a template is a program that runs on untrusted values; these are its failures
        except (
            JinjaError,
            TypeError,
            ValueError,
            LookupError,
            RecursionError,
        ) as error:
            raise TemplateError(
                f"the chat template rejects the messages: {error}", code="chat_template"
            ) from error

    def ids_of(self, text: str) -> Ids:
        """Tokenize a `text`."""
        if not self.keeps_apart:
            return self._encode_whole(text)
        runs = []
        for start, stop, token_id in self._cut(text):
            runs.append(self._piece(self.without_mark(text[start:stop])).ids)
            if token_id is not None:
                runs.append(np.array([token_id], np.int32))
        return np.concatenate(runs)

    def encode(self, text: str) -> Encoded:
        """Tokenize a `text`, with the characters that each id covers."""
        if not self.keeps_apart:
            encoded = self._backend.encode(text, add_special_tokens=False)
            offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
            return Encoded(
                np.array(encoded.ids, np.int32), offsets[:, 0], offsets[:, 1]
            )
        runs, starts, stops = [], [_NOWHERE], [_NOWHERE]
        marked = self._mark in text
        for start, stop, token_id in self._cut(text):
            part = text[start:stop]
            piece = self._piece(self.without_mark(part))
            runs.append(piece.ids)
            # the position of each mark in the piece without the marks before it
            marks = [m.start() for m in re.finditer(self._mark, part)] if marked else []
            before = np.array(marks, np.int64) - np.arange(len(marks)) * len(self._mark)
            for part_of, side, last in ((starts, 0, 0), (stops, 1, 1)):
                column = piece.offsets[:, side]
                offset = start + column.astype(np.int64)
                if marks:
                    passed = np.searchsorted(before, column - last, side="right")
                    offset += passed * len(self._mark)
                part_of.append(offset)
            if token_id is not None:
                end = stop + len(self._spelling[token_id])
                runs.append(np.array([token_id], np.int32))
                starts.append(np.array([stop], np.int64))
                stops.append(np.array([end], np.int64))
        return Encoded(
            np.concatenate(runs), np.concatenate(starts), np.concatenate(stops)
        )

    def _cut(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """Yield the pieces of a text, each with the special token that ends it."""
        offset = 0
        for match in self._spelled.finditer(text):
            yield offset, match.start(), self._special[match.group()]
            offset = match.end()
        yield offset, len(text), None

    def spells_special(self, value: object) -> bool:
        """Return whether a string or key in a JSON value spells out a special token."""
        lead, left = self._lead, [value]
        while left:
            item = left.pop()
            if isinstance(item, str):
                if lead in item and self._spelled.search(item) is not None:
                    return True
            elif isinstance(item, dict):
                left += item
                left += item.values()
            elif isinstance(item, list):
                left += item
        return False

    def _encode_whole(self, text: str) -> Ids:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def _break(self, value: object) -> object:
        """``value`` with the mark inside each spelled-out special token."""
        if isinstance(value, str):
            while self._spelled.search(value):
                value = self._spelled.sub(
                    lambda m: m[0][0] + self._mark + m[0][1:], value
                )
            return value
        if isinstance(value, dict):
            return {
                str(self._break(key)): self._break(item) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._break(item) for item in value]
        return value

    def _split_agrees(self) -> bool:
        """Whether tokenizing the pieces between special tokens gives the same ids."""
        if any(len(token) < 2 for token in self._special):
            return False
        pieces = TokenizeCache(self._plain, 0)
        for begins in _PROBE_PIECES:
            text = begins.join(["", *self._special, ""])
            ids: list[int] = []
            for start, stop, token_id in self._cut(text):
                ids += pieces(text[start:stop]).ids.tolist()
                ids += [] if token_id is None else [token_id]
            if self._encode_whole(text).tolist() != ids:
                return False
        return True

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
        shaped = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": self._arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
        return {**message, "content": content, "tool_calls": shaped}

    def _arguments(self, text: str) -> object:
        if self._takes_string:
            return text
        try:
            return json.loads(text) if text else {}
        except (ValueError, RecursionError):
            return text

    def _probe_template(self) -> tuple[bool, str]:
        """Whether arguments may be strings, and the white space before a call."""
        function = {"name": "probe", "arguments": _PROBE_ARGUMENTS}
        call = {"id": "call_0", "type": "function", "function": function}
        probe: list[Json] = [
            {"role": "user", "content": "user"},
            {"role": "assistant", "content": _PROBE_TEXT, "tool_calls": [call]},
        ]
        try:
            text = self._apply(probe, None)
        except TemplateError:
            return False, ""
        before, _, _ = text.partition("<tool_call>")
        _, _, separator = before.rpartition(_PROBE_TEXT)
        spaced = separator if separator and separator.isspace() else ""
        return _PROBE_ARGUMENTS in text, spaced

    def _probe_markup(self) -> bool:
        """Whether a call in an assistant message's text is rendered unchanged."""
        text = (
            f"{_PROBE_TEXT}<tool_call>\n{_PROBE_ARGUMENTS}\n</tool_call> {_PROBE_TEXT}"
        )
        probe: list[Json] = [
            {"role": "user", "content": "user"},
            {"role": "assistant", "content": text},
            {"role": "tool", "content": "tool", "tool_call_id": "call_0"},
        ]
        try:
            return text in self._apply(probe, None)
        except TemplateError:
            return False

    def _probe_late_system(self) -> bool:
        """Whether a system message is allowed after other messages."""
        roles = ("user", "assistant", "system", "user")
        probe: list[Json] = [
            {"role": role, "content": f"{_PROBE_TEXT}{k}"}
            for k, role in enumerate(roles)
        ]
        try:
            return f"{_PROBE_TEXT}2" in self._apply(probe, None)
        except TemplateError:
            return False


def _one_system(messages: list[Json]) -> list[Json]:
    """Adapt messages to a template that allows only one system message, at the start.

    Leading system messages are joined; later ones become reminders by the user.
    """
    first = next(
        (k for k, message in enumerate(messages) if message["role"] != "system"),
        len(messages),
    )
    system = "\n\n".join(str(message["content"]) for message in messages[:first])
    merged: list[Json] = [{"role": "system", "content": system}] if first else []
    return merged + [
        {
            "role": "user",
            "content": f"<system-reminder>\n{message['content']}\n</system-reminder>",
        }
        if message["role"] == "system"
        else message
        for message in messages[first:]
    ]


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


def _lead_of(words: list[str]) -> str:
    """The common prefix of all words."""
    if not words:
        return ""
    ends = zip(min(words), max(words), strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], ends))
