"""The training demo: its engine, its losses, and the loop through the gateway."""

import asyncio
import json
import time
from random import Random
from unittest.mock import Mock

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
import torch

import trajkit as tk
from tests.shim.fakes import engine_request, load_tokenizer
from trajkit.schema import SESSIONS
from trajkit_shim.app import create_app
from trajkit_shim.client import GatewayClient
from trajkit_shim.engines.base import UpdatableEngine
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog
from trajkit_train.agents import Agents
from trajkit_train.loop import mismatch
from trajkit_train.model import END, make_model, make_tokenizer
from trajkit_train.run import run_train
from trajkit_train.settings import Settings
from trajkit_train.torch_engine import TorchEngine
from trajkit_train.trainer import train_steps

TOKENIZER = make_tokenizer()
(END_ID,) = TOKENIZER.encode(END)


def small_model(seed=0, attention="sdpa"):
    model = make_model(len(TOKENIZER), seed=seed, width=32, layers=2)
    model.set_attn_implementation(attention)
    return model


def recomputed(model, prompt, output, temperature=1.0):
    """The logprob of each output id, from one forward pass without a cache."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
    logprobs = logits.log_softmax(1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def sampled(engine, prompt, **params):
    defaults = {"max_new_tokens": 12, "stop_token_ids": (END_ID,)}
    return await engine.generate(engine_request(prompt, **{**defaults, **params}))


async def all_sampled(engine, prompts, **params):
    return await asyncio.gather(*(sampled(engine, each, **params) for each in prompts))


def run(work, model=None, **options):
    """What a coroutine function of an engine returns; the engine is closed."""

    async def main():
        engine = TorchEngine(model or small_model(), **options)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


PROMPTS = [[5, 9, 11], list(range(20, 60)), [7], [100] * 17, [3, 3, 150, 2]]


@pytest.mark.parametrize("temperature", [None, 0.7, 1.5])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(temperature):
    model = small_model()
    options = {"temperature": temperature, "seed": 1}
    samples = run(lambda engine: all_sampled(engine, PROMPTS, **options), model)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        expected = recomputed(model, prompt, sample.output_ids, temperature or 1.0)
        np.testing.assert_allclose(sample.output_logprobs, expected, atol=2e-5)
        ended = sample.output_ids[-1] == END_ID
        assert sample.finish_reason == ("stop" if ended else "length")
        assert END_ID not in sample.output_ids[:-1]


def test_a_seeded_call_does_not_depend_on_its_batch():
    one, other = (
        run(lambda engine, n=n: all_sampled(engine, PROMPTS[:n], seed=1))[0]
        for n in (1, len(PROMPTS))
    )
    assert one.output_ids.tolist() == other.output_ids.tolist()


LACKED = {"temperature": 0.0, "top_p": 0.9, "top_k": 3, "stop": ("x",)}


def test_what_cannot_be_sampled_is_refused():
    async def work(engine):
        for name, value in (*LACKED.items(), ("extra", {"regex": "a"})):
            said = "regex" if name == "extra" else name
            with pytest.raises(EngineError, match=said) as refused:
                await sampled(engine, [1], **{name: value})
            assert refused.value.status == 400
        # beyond the embedding table
        with pytest.raises(EngineError, match="sampling failed"):
            await sampled(engine, [10_000])
        return await sampled(engine, [1])

    assert len(run(work).output_ids)


def test_weights_change_in_the_middle_of_a_reply(tmp_path):
    old, new = small_model(seed=0), small_model(seed=1)
    new.save_pretrained(tmp_path)
    reached = asyncio.Event()

    async def work(engine):
        assert isinstance(engine, UpdatableEngine)
        loop = asyncio.get_running_loop()

        def stop_after_four(*_):
            calls.append(None)
            if len(calls) == 4:
                loop.call_soon_threadsafe(reached.set)
                while engine._running.is_set():
                    time.sleep(0)

        calls = []
        hook = old.register_forward_hook(stop_after_four)
        call = asyncio.ensure_future(
            sampled(engine, PROMPTS[0], stop_token_ids=(), seed=3)
        )
        await reached.wait()
        await engine.pause()
        hook.remove()
        await engine.pause()
        await engine.update_weights(str(tmp_path), "new")
        await engine.resume()
        return await call

    sample = run(work, old, version="old")
    spans = [(s.version, s.start, s.stop) for s in sample.weight_versions]
    assert spans == [("old", 0, 4), ("new", 4, 12)]
    for model, part in ((old, slice(0, 4)), (new, slice(4, 12))):
        expected = recomputed(model, PROMPTS[0], sample.output_ids)[part]
        np.testing.assert_allclose(sample.output_logprobs[part], expected, atol=2e-5)


def test_weights_that_do_not_fit_leave_the_old_ones(tmp_path):
    make_model(len(TOKENIZER), seed=0, width=64, layers=2).save_pretrained(tmp_path)
    partial = small_model()
    kept = {k: v for k, v in partial.state_dict().items() if "norm" not in k}
    partial.save_pretrained(tmp_path / "partial", state_dict=kept)

    async def work(engine):
        before = await sampled(engine, [1], seed=0)
        for folder in ("", "partial", "absent"):
            await engine.pause()
            with pytest.raises(EngineError, match="do not load"):
                await engine.update_weights(str(tmp_path / folder), "bad")
            await engine.resume()
        after = await sampled(engine, [1], seed=0)
        assert after.output_ids.tolist() == before.output_ids.tolist()
        assert after.weight_versions == before.weight_versions

    run(work)


def drifting_turns(model):
    """Three turns of one session, each without the first two tokens of the reply before."""
    draw, prompt, messages = Random(0), [5, 9, 11], [{"role": "user", "content": "0"}]
    calls = []
    for turn in range(3):
        output = [*draw.choices(range(5, END_ID), k=11), END_ID]
        reply = {"role": "assistant", "content": f"reply {turn}"}
        call = {
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": recomputed(model, prompt, output).tolist(),
            "prompt_messages": [*messages],
            "response_message": reply,
            "finish_reason": "stop",
        }
        calls.append(call)
        messages += [reply, {"role": "user", "content": str(turn + 1)}]
        prompt = [*prompt, *output[2:], 30 + turn]
    return tk.from_records([{**c, "session_id": name} for name in "ab" for c in calls])


@pytest.mark.parametrize("policy", ["faithful", "slime", "trl", "polar"])
def test_only_rows_out_of_context_have_a_mismatch(tmp_path, policy):
    model = small_model()
    turns = drifting_turns(model)
    model.set_attn_implementation("trajkit")
    sessions = pa.Table.from_pylist(
        [
            {"session_id": name, "reward": reward, "group_id": "g", "error": None}
            for name, reward in (("a", 1.0), ("b", 0.0))
        ],
        SESSIONS,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gateway, settings = Mock(), Settings(steps=1, row_policy=policy)
    given = (lambda _: (turns, sessions), str(tmp_path / "weights"), settings)
    (step,) = train_steps(model, optimizer, gateway, *given)
    names = [name for name, _, _ in gateway.method_calls]
    assert names == ["pause", "update_weights", "resume"]
    report, packs = step["report"], step["packs"]
    apart = torch.cat([mismatch(model, packs[k]) for k in range(len(packs))])
    sampled, trained = (
        sum(report[f"tokens_{name}"].to_pylist()) for name in ("sampled", "trained")
    )
    simulated = tk.simulate(turns, [policy]).to_pylist()[0]
    assert trained == simulated["tokens_trained"]
    assert (simulated["tokens_out_of_context"] > 0) == (policy == "polar")
    if policy == "polar":
        assert apart.max() > 0.1
    else:
        assert apart.max() < 2e-5
    assert (trained == sampled) == (policy in ("faithful", "polar"))


def test_the_demo_trains_reports_and_keeps_its_run(tmp_path, capsys):
    settings = Settings(
        warm_runs=60, warm_steps=40, steps=2, tasks=2, samples=4, width=32
    )
    policies = ["faithful", "polar"]
    assert run_train(tmp_path, settings, policies=policies, seeds=[4], json=True) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["same_rollouts"]
    assert [line["policy"] for line in summary["policies"]] == policies
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert 0 < summary["warm_start"][0]["scripted_reward"] < 0.5
    with pa.ipc.open_file(tmp_path / "steps.arrow") as file:
        lines = file.read_all().to_pylist()
    assert [(x["policy"], x["step"]) for x in lines] == [
        (policy, step) for policy in policies for step in range(2)
    ]
    for line in lines[:2]:
        # the engine has the trainer's weights, and every token its context
        assert line["mismatch_max"] < 1e-4
        assert line["tokens_trained"] == line["tokens_sampled"]
    turns = tk.read_turns(tmp_path / "faithful/4/log")
    versions = {
        (turn["session_id"].split(".")[1], span["version"])
        for turn in turns.select(["session_id", "weight_versions"]).to_pylist()
        for span in turn["weight_versions"]
    }
    assert versions == {("0", "warm-start"), ("1", "step-1")}
    sessions = tk.read_sessions(tmp_path / "faithful/4/log")
    assert sessions["reward"].null_count == 0
    assert "<svg" in (tmp_path / "reward.svg").read_text()


def test_an_error_of_the_gateway_ends_an_agent_s_work(tmp_path):
    app = create_app(
        EmbeddedEngine(load_tokenizer()),
        ChatRenderer(load_tokenizer()),
        TurnLog(tmp_path / "log"),
    )
    with running(app) as url, GatewayClient(url) as gateway, httpx.Client() as http:
        agents = Agents(gateway, http)
        session = gateway.open("a")
        gateway.finish("a")
        with pytest.raises(ConnectionError, match=r"chat/completions: 410 .*a.*$"):
            agents._call(session, {"model": "m", "messages": []})
