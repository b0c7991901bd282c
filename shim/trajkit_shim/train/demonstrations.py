"""Scripted runs for the warm start: an engine that knows the rules and often errs."""

import random

import numpy as np
from transformers import PreTrainedTokenizerFast

from trajkit_shim.engines import base
from trajkit_shim.train.model import END
from trajkit_shim.train.task import NUMBERS, PEOPLE, PLACES


class Demonstrator:
    """An `Engine` that writes the replies of the scripted agent.

    Half of its replies begin with reasoning, and half of its tool calls lack the line
    break that the chat template writes at their end. It does something at random in 20 %
    of the replies with reasoning, and in 50 % of the others.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._info = base.EngineInfo(
            model="demonstrator",
            vocab_size=len(tokenizer),
            max_context_tokens=512,
        )

    async def info(self) -> base.EngineInfo:
        """Model name, vocabulary size and context length."""
        return self._info

    async def generate(self, request: base.EngineRequest) -> base.Sample:
        """Write a reply to the last message of a prompt."""
        text = str(self._tokenizer.decode(request.prompt_ids.tolist()))
        last = text.rsplit("<|im_start|>", 2)[1].removesuffix(END).split()[-1]
        ids = self._tokenizer.encode(
            self._reply(last, random.Random(request.sampling.seed)) + END,
            add_special_tokens=False,
        )
        return base.Sample(
            output_ids=np.array(ids, np.int32),
            output_logprobs=None,
            finish_reason="stop",
        )

    async def close(self) -> None:
        """Nothing to release."""

    def _reply(self, last: str, draw: random.Random) -> str:
        kinds = {"person": PEOPLE, "place": PLACES, "number": NUMBERS}
        kind = next((k for k, names in kinds.items() if last in names), None)
        thinks = draw.random() < 0.5
        if kind is None or draw.random() < (0.2 if thinks else 0.5):
            kind = draw.choice(list(kinds))
            last = draw.choice(kinds[kind])
        thought = f"<think>{last} is a {kind}</think>" if thinks else ""
        if kind == "number":
            return thought + last
        tool = {"person": "ask", "place": "open"}[kind]
        newline = draw.choice(["\n", ""])
        return (
            f'{thought}<tool_call>\n{{"name": "{tool}", "arguments": '
            f'{{"name": "{last}"}}}}{newline}</tool_call>'
        )
