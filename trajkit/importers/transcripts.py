"""Text that no engine sampled, encoded by a tokenizer with a chat template.

The prompt of a reply is the template's text of the messages before it. Its output is what
an engine would sample: the template's text of the reply, with the token that ends it.
``sampled`` is false, ``call_kind`` is "transcript", and there are no logprobs.
"""

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np

from trajkit.analysis.tokenizer import Codec, Ids, Tokenizer
from trajkit.errors import ArgumentError
from trajkit.importers.findings import Finding, Refused, object_of

_Message: TypeAlias = dict[str, object]


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
        self._tokenizer = tokenizer
        self._codec = Codec(tokenizer)

    def replies(self, found: Finding, messages: object) -> Iterator[Finding]:
        """A call for each reply of a conversation."""
        listed = (
            [object_of(one) for one in messages] if isinstance(messages, list) else []
        )
        replies = [k for k, one in enumerate(listed) if one.get("role") == "assistant"]
        if not replies:
            yield found.refuse("no_output_ids", "it has no reply")
        for k in replies:
            one = Finding(
                f"{found.place}, message {k}",
                found.session,
                dict(found.fields),
                remarks=list(found.remarks),
                run_keys=found.run_keys,
                unread=found.unread if k == replies[0] else {},
                tools=found.tools,
                origin=found.origin,
            )
            following = listed[k + 1] if k + 1 < len(listed) else None
            one.fields |= {"prompt_messages": listed[:k], "response_message": listed[k]}
            yield self.encoded(one, following)

    def encoded(self, found: Finding, following: _Message | None = None) -> Finding:
        """A call with messages and without ids, with the ids of its text."""
        with found:
            before = found.fields.get("prompt_messages")
            reply = found.fields.get("response_message")
            if not isinstance(before, list) or not before:
                raise Refused("no_prompt_ids", "no message comes before it")
            if not isinstance(reply, dict):
                raise Refused("no_output_ids", "it has no reply")
            prompt, output = self._ids(found, before, reply, following)
            found.fields |= {
                "prompt_ids": prompt,
                "output_ids": output,
                "call_kind": "transcript",
                "sampled": False,
            }
            # what the source counted are other tokens
            found.claims.clear()
            found.remarks.append(("not_sampled", ""))
        return found

    def _ids(
        self,
        found: Finding,
        before: list[_Message],
        reply: _Message,
        following: _Message | None,
    ) -> tuple[Ids, Ids]:
        tools = found.tools
        prompt = self._text(before, tools, asks=True)
        complete = self._text([*before, reply], tools)
        if not complete.startswith(prompt):
            detail = "with the reply, the template renders another prompt"
            raise Refused("not_a_prefix", detail)
        output = self._codec.ids(complete[len(prompt) :])
        ends = np.flatnonzero(self._codec.special(output))
        if len(ends):
            last = int(ends[-1])
            # what follows an end token, such as a line feed, is the template's
            if not self._codec.text(output[last + 1 :]).strip():
                return self._codec.ids(prompt), output[: last + 1]
        end = self._next_marker(before, reply, tools, following)
        if end is None:
            found.remarks.append(("no_end_token", "no special token ends the reply"))
            return self._codec.ids(prompt), output
        return self._codec.ids(prompt), np.append(output, np.int32(end))

    def _next_marker(
        self,
        before: list[_Message],
        reply: _Message,
        tools: object,
        following: _Message | None,
    ) -> int | None:
        """The special token with which the template begins the message after a reply."""
        if following is None:
            calls = bool(reply.get("tool_calls"))
            following = {"role": "tool" if calls else "user", "content": "x"}
        plain: _Message = {"role": "assistant", "content": "x"}
        for said in (reply, plain):
            # what a later message makes of a reply may differ: of reasoning, above all
            try:
                text = self._text([*before, said], tools)
                longer = self._text([*before, said, following], tools)
            except Refused:
                continue
            if longer.startswith(text):
                ids = self._codec.ids(longer[len(text) :])
                if len(ids) and self._codec.special(ids[:1])[0]:
                    return int(ids[0])
        return None

    def _text(
        self, messages: list[_Message], tools: object, *, asks: bool = False
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=asks, tokenize=False
                )
            )
        # a template may raise an error of jinja2, or anything in its filters
        except Exception as error:
            raise Refused("refused", str(error)) from None
