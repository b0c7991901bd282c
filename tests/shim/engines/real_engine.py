"""What must hold with the real server of each engine, on a CPU with a random model.

`test_sglang_real` and `test_vllm_real` run these tests.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Mapping

import numpy as np
import openai
import pyarrow.compute as pc
import pytest

import trajkit as tk
from tests.made_tables import linearized
from tests.shim.clients import in_process, read_log
from tests.shim.fakes import TOOL, engine_request
from trajkit_shim.errors import EngineError
from trajkit_shim.replies import FORMS, FormParser

# a grammar makes a random model call tools, in a spelling of its own
CALLS = (
    r"Let me look\.\n<tool_call>\n"
    r'\{"name": "bash", "arguments": \{"command": "cat [a-c]\.txt"\}\}'
    r"\n</tool_call>"
)
USER = {"role": "user", "content": "What is in the file?"}
LETTERS = {"type": "string", "enum": ["a.txt", "b.txt"]}
SCHEMA = {
    "type": "object",
    "properties": {"path": LETTERS},
    "required": ["path"],
    "additionalProperties": False,
}


async def ask(client, messages, **fields):
    return await client.chat.completions.create(
        model="tiny", messages=messages, **fields
    )


async def sample(engine, **changes):
    asked = {"request_id": uuid.uuid4().hex, "max_new_tokens": 8, **changes}
    return await engine.generate(engine_request(range(10, 20), **asked))


async def greedy(engine):
    return (await sample(engine, temperature=0.0)).output_ids.tolist()


def tool(name):
    function = {"name": name, "strict": True, "parameters": SCHEMA}
    return {"type": "function", "function": function}


def forced(logprobs):
    """A grammar leaves most tokens no choice, and this model little between others."""
    assert max(logprobs) == pytest.approx(0, abs=1e-4)
    assert min(logprobs) < -0.1


class RealEngine:
    """The tests of both; ``engine``, ``renderer`` and ``unreasoned`` are fixtures."""

    name: str  # of the server, in errors
    max_context = 0
    refused: Mapping[str, object]  # a parameter of the engine that it refuses

    @staticmethod
    def regex(pattern):
        """The engine's parameters for a regular expression."""
        raise NotImplementedError

    @staticmethod
    async def n_running(engine):
        """How many calls the server has under way."""
        raise NotImplementedError

    async def n_sampled(self, engine):
        """A count that grows once a call is sampled, also where the last one is stale."""
        return await self.n_running(engine)

    async def until_sampled(self, engine, before):
        async with asyncio.timeout(120):
            while await self.n_sampled(engine) <= before:
                await asyncio.sleep(0)

    async def test_a_conversation_with_tools(self, tmp_path, renderer, engine):
        async with in_process(engine, renderer, tmp_path) as gateway:
            client = await gateway.open(sampling={"extra": self.regex(CALLS)})
            messages = [{"role": "system", "content": "be brief. " * 100}, USER]
            for _ in range(3):
                reply = await ask(client, messages, tools=[TOOL], max_tokens=300)
                message = reply.choices[0].message
                assert reply.choices[0].finish_reason == "tool_calls"
                assert message.content == "Let me look.\n"
                (call,) = message.tool_calls
                command = json.loads(call.function.arguments)["command"]
                assert re.fullmatch(r"cat [a-c]\.txt", command)
                messages += [
                    message.model_dump(exclude_none=True),
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": "no such file",
                    },
                ]
            log = read_log(gateway.log.path)
        turns = log.to_pylist()
        tk.validate(log)
        assert [turn["use_tool"] for turn in turns] == [True] * 3
        for turn in turns:
            assert turn["model"] == "tiny"
            assert turn["finish_reason"] == "stop"
            assert turn["output_ids"][-1] == renderer.end_ids[0]
            assert len(turn["output_logprobs"]) == len(turn["output_ids"])
            # what the grammar forces has probability 1, what it leaves open has not
            assert max(turn["output_logprobs"]) <= 1e-4
            assert min(turn["output_logprobs"]) < -0.1
            assert turn["weight_versions"] == [
                {"version": "default", "start": 0, "stop": len(turn["output_ids"])}
            ]
        assert turns[1]["cached_tokens"] > 0

        # every echo is recognised, and every sampled token ends in one row's mask
        links = tk.link(log)
        assert links["parent"].to_pylist() == [None, 0, 1]
        rows, report = linearized(log, policy="strict", reward=1.0)
        sampled = sum(len(turn["output_ids"]) for turn in turns)
        assert report["tokens_trained"].to_pylist() == [sampled]
        assert pc.sum(pc.list_flatten(rows["loss_mask"])).as_py() == sampled

    async def test_a_streaming_client(self, tmp_path, renderer, engine):
        async with in_process(engine, renderer, tmp_path) as gateway:
            client = await gateway.open()
            stream = await ask(
                client,
                [USER],
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=8,
                temperature=0.7,
            )
            chunks = [chunk async for chunk in stream]
            (turn,) = gateway.turns()
        assert chunks[-1].usage.completion_tokens == len(turn["output_ids"]) == 8
        assert chunks[-2].choices[0].finish_reason == "length"
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        assert text == renderer.decode(np.array(turn["output_ids"]), ended=False)

    @pytest.mark.parametrize(
        ("sampling", "most"),
        [
            pytest.param({"top_k": 4}, 4, id="top_k"),
            pytest.param({"temperature": 0.0}, 1, id="greedy"),
        ],
    )
    async def test_logprobs_are_those_of_what_was_sampled_from(
        self, sampling, most, engine
    ):
        """Of a random model's 3,000 tokens each has about the same logprob, of 4 also."""
        sampled = await sample(engine, **sampling)
        assert sampled.output_logprobs == pytest.approx(
            np.full(8, -np.log(most)), abs=0 if most == 1 else 1.0
        )

    async def test_what_ends_a_reply(self, engine):
        """An id, a text, and the limit; the id and the text's tokens are in the ids."""
        only = {"logit_bias": {"301": 100.0}}
        free = await sample(engine, extra=only)
        assert (free.output_ids.tolist(), free.finish_reason) == ([301] * 8, "length")
        by_id = await sample(engine, extra=only, stop_token_ids=(301,))
        assert (by_id.output_ids.tolist(), by_id.finish_reason) == ([301], "stop")
        by_text = await sample(
            engine, stop=("cat",), extra=self.regex("a cat sat"), max_new_tokens=20
        )
        assert by_text.finish_reason == "stop"

    @pytest.mark.parametrize(
        "form", [name for name, form in FORMS.items() if form.grammar is not None]
    )
    async def test_a_required_call(self, tmp_path, unreasoned, engine, form):
        options = {"reply_parser": FormParser(FORMS[form])}
        async with in_process(engine, unreasoned, tmp_path, **options) as gateway:
            client = await gateway.open()
            reply = await ask(
                client,
                [USER],
                tools=[tool("read"), tool("write")],
                tool_choice={"type": "function", "function": {"name": "write"}},
                parallel_tool_calls=False,
                # a random model writes some hundred tokens of white space between tags
                max_tokens=8000,
            )
            (turn,) = gateway.turns()
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "write"
        # xgrammar allows white space around values between tags
        path = json.loads(call.function.arguments)["path"].strip()
        assert path in LETTERS["enum"]
        assert reply.choices[0].finish_reason == "tool_calls"
        assert turn["output_ids"][-1] == unreasoned.end_ids[0]
        assert json.loads(turn["sampling"])["structural_tag"]
        forced(turn["output_logprobs"])

    async def test_a_required_schema(self, tmp_path, unreasoned, engine):
        schema = {"name": "file", "schema": SCHEMA}
        async with in_process(engine, unreasoned, tmp_path) as gateway:
            client = await gateway.open()
            reply = await ask(
                client,
                [USER],
                response_format={"type": "json_schema", "json_schema": schema},
                max_tokens=8000,
            )
            (turn,) = gateway.turns()
        path = json.loads(reply.choices[0].message.content)["path"]
        assert path in LETTERS["enum"]
        forced(turn["output_logprobs"])

    async def test_the_limits_of_the_server(self, renderer, engine):
        info = await engine.info()
        assert info.model == "tiny"
        assert info.max_context_tokens == self.max_context
        assert info.vocab_size >= len(renderer.tokenizer)
        request = engine_request([info.vocab_size - 1], request_id=uuid.uuid4().hex)
        await engine.generate(request)

    async def test_a_long_call(self, engine):
        """A prompt of 8,000 ids, and a reply of 300."""
        prompt = np.arange(8000) % 2000 + 100
        request = engine_request(
            prompt,
            request_id=uuid.uuid4().hex,
            max_new_tokens=300,
            extra={"ignore_eos": True},
        )
        sampled = await engine.generate(request)
        assert (sampled.prompt_tokens, len(sampled.output_ids)) == (8000, 300)
        assert len(sampled.output_logprobs) == 300

    async def test_many_calls_at_once(self, engine):
        calls = (sample(engine, session_id=f"s{k}") for k in range(40))
        sampled = await asyncio.gather(*calls)
        assert {len(each.output_ids) for each in sampled} <= {*range(1, 9)}

    async def test_a_prompt_that_leaves_no_room(self, tmp_path, renderer, engine):
        async with in_process(engine, renderer, tmp_path) as gateway:
            client = await gateway.open()
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, [{"role": "user", "content": "\x00" * 66_000}])
            assert gateway.turns() == []
        assert caught.value.code == "context_length_exceeded"

    async def test_a_prompt_that_the_server_finds_too_long(self, engine):
        with pytest.raises(EngineError, match="answered 400: ") as caught:
            await engine.generate(engine_request(np.full(self.max_context + 10, 7)))
        assert caught.value.status == 400

    async def test_what_the_server_refuses(self, tmp_path, renderer, engine):
        async with in_process(engine, renderer, tmp_path) as gateway:
            client = await gateway.open(sampling={"extra": dict(self.refused)})
            match = f"{self.name} server answered 400"
            with pytest.raises(openai.BadRequestError, match=match):
                await ask(client, [USER], max_tokens=4)
            assert gateway.turns() == []

    async def test_cancelling_ends_the_call_at_the_server(
        self, tmp_path, renderer, engine
    ):
        limit = {"max_new_tokens": 30_000}
        async with in_process(engine, renderer, tmp_path, **limit) as gateway:
            client = await gateway.open(sampling={"extra": {"ignore_eos": True}})
            before = await self.n_sampled(engine)
            call = asyncio.create_task(ask(client, [USER]))
            await self.until_sampled(engine, before)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(120):
                while await self.n_running(engine):
                    await asyncio.sleep(0)
            assert gateway.turns() == []

    async def test_a_call_that_is_aborted_at_the_server(
        self, tmp_path, renderer, engine
    ):
        """Its turn is context only, and its client is told to try again."""
        limit = {"max_new_tokens": 30_000}
        async with in_process(engine, renderer, tmp_path, **limit) as gateway:
            client = await gateway.open(sampling={"extra": {"ignore_eos": True}})
            before = await self.n_sampled(engine)
            call = asyncio.create_task(ask(client, [USER]))
            await self.until_sampled(engine, before)
            await self.abort_all(engine)
            with pytest.raises(openai.InternalServerError, match="with abort"):
                await call
            (turn,) = gateway.turns()
        assert (turn["finish_reason"], turn["trainable"]) == ("abort", False)
        assert len(turn["output_logprobs"]) == len(turn["output_ids"])

    async def change_weights(self, tmp_path, renderer, engine, source, old):
        """Update while a call runs, then go back; return what changed of greedy calls."""
        old_reply = await greedy(engine)
        # so many that it still runs when a busy server says so
        n_tokens = 1000
        limit = {"max_new_tokens": n_tokens}
        async with in_process(engine, renderer, tmp_path, **limit) as gateway:
            client = await gateway.open(sampling={"extra": {"ignore_eos": True}})
            before = await self.n_sampled(engine)
            call = asyncio.create_task(ask(client, [USER]))
            await self.until_sampled(engine, before)
            paused = await gateway.http.post("/engine/pause", json={"timeout_s": 300})
            assert paused.status_code == 200, paused.text
            updated = await gateway.http.post(
                "/engine/update", json={**source, "weight_version": "step-1"}
            )
            assert updated.status_code == 200, updated.text
            assert not call.done()
            await gateway.http.post("/engine/resume")
            await call
            (turn,) = gateway.turns()
            changed = await greedy(engine)
            # later tests find the server as it was
            await gateway.http.post("/engine/pause", json={"timeout_s": 300})
            back = {"model_path": old, "weight_version": "default"}
            answer = await gateway.http.post("/engine/update", json=back)
            assert answer.status_code == 200
            await gateway.http.post("/engine/resume")
        assert await greedy(engine) == old_reply
        spans = turn["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "step-1"]
        assert spans[0]["start"] == 0
        assert spans[0]["stop"] == spans[1]["start"]
        assert spans[1]["stop"] == len(turn["output_ids"]) == n_tokens
        return changed != old_reply
