"""Chat messages to prompt ids and sampled ids to text, with a tokenizer's own template.

A message cannot forge the structure of the prompt. The text of messages and tools may
spell a special token out (``<|im_end|>`` in a file that a tool read); such text is
encoded as the ordinary text that it is, and only what the template itself writes
becomes a control id. Added tokens that are not special (``<think>``, ``<tool_call>``)
are markup that models write themselves: they are encoded as the tokenizer does.

Everything here is safe to call from several threads at once.
"""

import json
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from trajkit_shim.attribution import Attribution, Encoded, attribute
from trajkit_shim.errors import GatewayError, TemplateError
from trajkit_shim.wire import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids: TypeAlias = npt.NDArray[np.int32]

_NOWHERE = np.empty(0, np.int64)
_PROBE_TEXT = "lead"
_PROBE_ARGUMENTS = '{"probe":  1}'


class ChatRenderer:
    """One tokenizer and its chat template.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        A fast tokenizer. Its ``eos_token`` ends an assistant message.
    chat_template : str, optional
        Used in place of the tokenizer's own template.

    Raises
    ------
    ValueError
        There is no template, or no token that ends a message.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", chat_template: str | None = None
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
        longest_first = sorted(self._special, key=len, reverse=True)
        # the empty alternation would match everywhere
        spelled = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelled = re.compile(spelled)
        self._keeps_apart = self._split_agrees()
        self._takes_string, self._call_separator = self._probe_template()
        self._keeps_markup = self._probe_markup()
        self._takes_late_system = self._probe_late_system()
        self._end_of_reasoning: int | None = self._backend.token_to_id("</think>")
        self.end_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)

    @property
    def n_tokens(self) -> int:
        """One more than the largest id that this tokenizer gives."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def chat_template(self) -> str:
        """The text of the template."""
        return self._template

    def render(self, messages: list[Json], tools: list[Json] | None) -> Ids:
        """The prompt that asks for the next assistant message.

        Parameters
        ----------
        messages : list of dict
            Canonical chat messages (`trajkit_shim.chat.canonical_message`).
        tools : list of dict or None
            Tool definitions in OpenAI's form.

        Returns
        -------
        ndarray of int32, shape (n_prompt,)

        Raises
        ------
        TemplateError
            The template refuses the messages.
        GatewayError
            A text spells out a special token, and this tokenizer cannot keep it apart
            from the real one.
        """
        text, mark = self._text(messages, tools)
        return self._encode(text) if mark is None else self._encode_marked(text, mark)

    def attribute(
        self, messages: list[Json], tools: list[Json] | None, prompt_ids: Ids
    ) -> Attribution | None:
        """Which message each prompt token shows, None where it cannot be told exactly.

        Parameters
        ----------
        messages, tools
            As `render` takes them.
        prompt_ids : ndarray of int32, shape (n_prompt,)
            What was made of them.
        """
        broken: list[str] = []

        def text_of(marked: list[Json]) -> str:
            text, mark = self._text(marked, tools)
            broken[:] = [mark] if mark is not None else []
            return text

        def encode(text: str) -> Encoded:
            mark = broken[0] if broken else None
            return self._encode_placed(text, mark)

        try:
            return attribute(
                messages,
                prompt_ids,
                text_of=text_of,
                encode=encode,
                special=list(self._special.values()),
            )
        except TemplateError:
            # the marks are what it refuses
            return None

    def _text(
        self, messages: list[Json], tools: list[Json] | None
    ) -> tuple[str, str | None]:
        """The prompt's text, and the mark that breaks up special tokens in it."""
        if not self._takes_late_system:
            messages = _one_system(messages)
        shaped = [self._for_template(message) for message in messages]
        asked = {"messages": shaped, "tools": tools}
        if self._spelled.search(_all_text(asked)) is None:
            return self._apply(shaped, tools), None
        if not self._keeps_apart:
            raise GatewayError(
                "a message or tool spells out a special token, which this model's "
                "tokenizer cannot encode as text",
                code="special_token_in_text",
            )
        mark = f"x{secrets.token_hex(12)}x"
        broken = self._break(asked, mark)
        assert isinstance(broken, dict)
        return self._apply(broken["messages"], broken["tools"]), mark

    def decode(self, output_ids: Ids, *, ended: bool) -> str:
        """The text of sampled ids, special tokens spelled out.

        Parameters
        ----------
        output_ids : ndarray of int32, shape (n_output,)
        ended : bool
            The model ended the message: a final end-of-message id is no text.
        """
        ids = output_ids.tolist()
        if ended and ids and ids[-1] in self.end_ids:
            ids.pop()
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def opens_reasoning(self, prompt_ids: Ids) -> bool:
        """Whether a prompt ends inside of the reply's reasoning."""
        # as long as "<think>\n" is in single bytes, and a bit
        tail = self._backend.decode(
            prompt_ids[-16:].tolist(), skip_special_tokens=False
        )
        return str(tail).rstrip().endswith("<think>")

    def end_of_reasoning(self, output_ids: Ids) -> int | None:
        """How many of the sampled ids come up to the end of reasoning, and with it.

        None: no token among them ends it.
        """
        if self._end_of_reasoning is None:
            return None
        ends = np.flatnonzero(output_ids == self._end_of_reasoning)
        return int(ends[0]) + 1 if len(ends) else None

    def _apply(self, messages: list[Json], tools: list[Json] | None) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    cast("list[dict[str, str]]", messages),
                    tools=cast("list[Any] | None", tools),
                    chat_template=self._template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        # a template is a program on values that a stranger sent: these are its failures
        except (
            JinjaError,
            TypeError,
            ValueError,
            LookupError,
            RecursionError,
        ) as error:
            raise TemplateError(
                f"the chat template refuses the messages: {error}", code="chat_template"
            ) from error

    def _encode(self, text: str) -> Ids:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def _encode_marked(self, text: str, mark: str) -> Ids:
        """Encode text in which ``mark`` breaks up the special tokens that are text."""
        ids: list[int] = []
        at = 0
        for match in self._spelled.finditer(text):
            ids += self._encode_plain(text[at : match.start()].replace(mark, ""))
            ids.append(self._special[match.group()])
            at = match.end()
        ids += self._encode_plain(text[at:].replace(mark, ""))
        return np.array(ids, dtype=np.int32)

    def _encode_placed(self, text: str, mark: str | None) -> Encoded:
        """As `_encode` or, with a mark, `_encode_marked`; and where each id stands."""
        if mark is None:
            whole = self._backend.encode(text, add_special_tokens=False)
            places = np.array(whole.offsets, np.int64).reshape(-1, 2)
            return Encoded(np.array(whole.ids, np.int32), places[:, 0], places[:, 1])
        ids: list[int] = []
        starts, stops = [_NOWHERE], [_NOWHERE]
        at = 0
        for match in [*self._spelled.finditer(text), None]:
            end = len(text) if match is None else match.start()
            part = self._plain.encode(
                text[at:end].replace(mark, ""), add_special_tokens=False
            )
            ids += part.ids
            places = np.array(part.offsets, np.int64).reshape(-1, 2)
            # of each mark in the piece, the place that it has without those before it
            marks = [m.start() for m in re.finditer(mark, text[at:end])]
            before = np.array(marks, np.int64) - np.arange(len(marks)) * len(mark)
            for part_of, side, column in (
                (starts, places[:, 0], places[:, 0]),
                (stops, places[:, 1], places[:, 1] - 1),
            ):
                passed = np.searchsorted(before, column, side="right")
                part_of.append(at + side + passed * len(mark))
            if match is not None:
                ids.append(self._special[match.group()])
                starts.append(np.array([match.start()], np.int64))
                stops.append(np.array([match.end()], np.int64))
                at = match.end()
        return Encoded(
            np.array(ids, np.int32), np.concatenate(starts), np.concatenate(stops)
        )

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _break(self, value: object, mark: str) -> object:
        """``value`` with ``mark`` inside each special token that it spells out."""
        if isinstance(value, str):
            while self._spelled.search(value):
                value = self._spelled.sub(lambda m: m[0][0] + mark + m[0][1:], value)
            return value
        if isinstance(value, dict):
            return {
                str(self._break(key, mark)): self._break(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._break(item, mark) for item in value]
        return value

    def _split_agrees(self) -> bool:
        """Encoding piece by piece between special tokens gives the same ids."""
        if any(len(token) < 2 for token in self._special):
            return False
        text = " a\n".join(["", *self._special, ""])
        return np.array_equal(self._encode(text), self._encode_marked(text, ""))

    def _for_template(self, message: Json) -> Json:
        """The message as this template renders it closest to what was sampled."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self._keeps_markup and "sampled" in message:
            # text stands behind a call, where no template would put it
            plain = {k: v for k, v in message.items() if k != "tool_calls"}
            return {**plain, "content": message["sampled"]}
        assert isinstance(calls, list)
        content = str(message["content"])
        separator = self._call_separator
        if separator and content.endswith(separator) and content != separator:
            # the template writes it again
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
        """Whether arguments may be strings, and what is put before a call."""
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
        """Whether a call in an assistant's text is rendered as it is."""
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
        """Whether a system message may stand among the others."""
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
    """The messages for a template that takes no system message but the first.

    System messages at the start become one; a later one stays where it is, as a
    reminder that the user gives.
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
    """The renderer of a model directory's tokenizer. Nothing is downloaded.

    Raises
    ------
    FileNotFoundError
        There is no such directory.
    ValueError
        It holds no fast tokenizer, or one without a chat template or a token that ends
        a message.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(path).is_dir():
        raise FileNotFoundError(f"no model directory {str(path)!r}")
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer of {str(path)!r} is not a fast one")
    return ChatRenderer(tokenizer, chat_template)


def _all_text(value: object) -> str:
    """Every string in a JSON value, keys included, with gaps between them."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\0".join(_all_text([key, item]) for key, item in value.items())
    if isinstance(value, list):
        return "\0".join(map(_all_text, value))
    return ""
