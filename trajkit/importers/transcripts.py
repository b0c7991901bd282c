"""Text that no engine sampled, encoded by a tokenizer with a chat template.

The prompt of a reply is the template's text of the messages before it. Its output is what
an engine would sample: the template's text of the reply, with the token that ends it.
``sampled`` is false, ``call_kind`` is "transcript", and there are no logprobs.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np

from trajkit.analysis.tokenizer import Codec, Ids, Tokenizer
from trajkit.errors import ArgumentError
from trajkit.importers.findings import Finding, Refused, list_of, object_of

_Messages: TypeAlias = list[dict[str, Any]]


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with a chat template, as transformers has them."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tools: object,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> object:
        """The text that the template makes of messages."""


class Encoder:
    """Makes calls of text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        for name in ("encode", "decode", "apply_chat_template"):
            if not callable(getattr(tokenizer, name, None)):
                raise ArgumentError(
                    f"tokenizer is a {type(tokenizer).__name__}, which has no method "
                    f"{name}: expected a tokenizer with a chat template, such as "
                    "transformers.AutoTokenizer.from_pretrained(...)"
                )
        if getattr(tokenizer, "chat_template", "") is None:
            raise ArgumentError("tokenizer has no chat template: set its chat_template")
        self._tokenizer, self._codec = tokenizer, Codec(tokenizer)
        # some models mark their roles with added tokens that are not special
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        self._added = {*added.values()}

    def replies(self, found: Finding, conversation: object) -> Iterator[Finding]:
        """A call for each reply of a conversation."""
        messages = [object_of(one) for one in list_of(conversation)]
        roles = [one.get("role") for one in messages]
        replies = [k for k, role in enumerate(roles) if role == "assistant"]
        if not replies:
            raise Refused("no_output_ids", "it has no reply")
        for k in replies:
            one = found.copy(f", message {k}", first=k == replies[0])
            one.fields |= {
                "prompt_messages": messages[:k],
                "response_message": messages[k],
            }
            self.encode(one, messages[k + 1 : k + 2])
            yield one

    def encode(self, found: Finding, following: _Messages | None = None) -> None:
        """Add the ids of its text to a call with messages and without ids."""
        if found.problem:
            return
        with found:
            before = found.fields.get("prompt_messages")
            reply = found.fields.get("response_message")
            if not isinstance(before, list) or not before:
                raise Refused("no_prompt_ids", "no message comes before it")
            if not isinstance(reply, dict):
                raise Refused("no_output_ids", "it has no reply")
            prompt = self._text(before, found, asks=True)
            complete = self._text([*before, reply], found)
            if not complete.startswith(prompt):
                text = "with the reply, the template renders another prompt"
                raise Refused("not_a_prefix", text)
            output = self._codec.ids(complete[len(prompt) :])
            end = self._end_token([*before, reply], found, following)
            # what the source counted are other tokens
            found.claims.clear()
            found.fields |= {
                "prompt_ids": self._codec.ids(prompt),
                "output_ids": self._ended(output, end, found),
                "call_kind": "transcript",
                "sampled": False,
            }
            found.remarks.append(("not_sampled", ""))

    def _ended(self, output: Ids, end: int | None, found: Finding) -> Ids:
        ends = self._codec.special(output)
        if end is not None:
            ends |= output == end
        # what follows an end token, such as a line feed, is the template's
        for last in np.flatnonzero(ends)[-1:].tolist():
            if not self._codec.text(output[last + 1 :]).strip():
                return output[: last + 1]
        if end is None:
            found.remarks.append(("no_end_token", "no special token ends the reply"))
            return output
        return np.append(output, np.int32(end))

    def _end_token(
        self, talk: _Messages, found: Finding, following: _Messages | None
    ) -> int | None:
        """The token with which the template ends a reply, or else begins the next role."""
        short = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            asked = self._text(short[:1], found, asks=True)
            said = self._text(short, found)
        except Refused:
            asked = said = ""
        closing = said.removeprefix(asked).partition("x")[2]
        if said.startswith(asked) and closing.strip():
            return self._marker(closing.lstrip())
        role = "tool" if talk[-1].get("tool_calls") else "user"
        following = following or [{"role": role, "content": "x"}]
        # what a later message makes of a reply may differ: of its reasoning, above all
        for messages in (talk, short):
            try:
                text = self._text(messages, found)
                longer = self._text([*messages, *following], found)
            except Refused:
                continue
            if longer.startswith(text):
                return self._marker(longer[len(text) :])
        return None

    def _marker(self, text: str) -> int | None:
        """The first token of a text, if it is a special token or an added one."""
        ids = self._codec.ids(text)[:1]
        if len(ids) and (self._codec.special(ids)[0] or int(ids[0]) in self._added):
            return int(ids[0])
        return None

    def _text(self, talk: _Messages, found: Finding, *, asks: bool = False) -> str:
        options: Any = {"tools": found.tools, "add_generation_prompt": asks}
        try:
            made = self._tokenizer.apply_chat_template(talk, tokenize=False, **options)
        # a template may raise an error of jinja2, or anything in its filters
        except Exception as error:
            raise Refused("refused", str(error)) from None
        return str(made)
