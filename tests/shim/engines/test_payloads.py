"""Routed experts and sampling masks, from an engine's reply to rows."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, ScriptedEngine
from tests.shim.sessions.test_turn_log import turn
from trajkit_shim.engines.http import read_experts
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.errors import EngineError
from trajkit_shim.sessions.turn_log import TurnLog


def experts_of(n_tokens, first):
    """Of all tokens but the last, in 2 layers, 3 experts each."""
    numbers = np.arange((n_tokens - 1) * 2 * 3) + first
    return numbers.reshape(-1, 2, 3).astype(np.int16)


class RoutingEngine(ScriptedEngine):
    """Says which experts it routed tokens to: other ones for each call.

    The ids that could have been drawn are the drawn one and the next.
    """

    async def generate(self, request):
        sample = await super().generate(request)
        n_tokens = len(request.prompt_ids) + len(sample.output_ids)
        first = 1000 * len(self.prompts)
        experts = experts_of(n_tokens, first)
        mask = [[token, token - 1] for token in sample.output_ids.tolist()]
        return replace(sample, routed_experts=experts, sampling_mask=mask)


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["full", "delta"])
async def test_payloads_go_into_the_log_and_into_rows(tmp_path, form):
    engine = RoutingEngine("a", "b")
    log = {"form": form, "routed_experts": True, "sampling_masks": True}
    async with in_process(engine, RENDERER, tmp_path, **log) as gateway:
        client = await gateway.open()
        messages = [{"role": "user", "content": "u"}]
        for _ in range(2):
            got = await client.chat.completions.create(model="m", messages=messages)
            said = {"role": "assistant", "content": got.choices[0].message.content}
            messages += [said, {"role": "user", "content": "v"}]
    turns = tk.read_turns(tmp_path)
    tk.validate(turns)
    lengths = [len(prompt) + 2 for prompt in engine.prompts]
    logged = turns["routed_experts"].to_pylist()
    for call, n_tokens in enumerate(lengths):
        told = experts_of(n_tokens, 1000 * (call + 1)).tolist()
        assert logged[call] == [*told, None]
    payloads = ["routed_experts", "sampling_mask"]
    (row,) = tk.linearize(turns, payloads=payloads, reward=1.0).to_pylist()
    # as the last call read them, but for what the first one sampled and read itself
    expected = logged[1]
    sampled_first = slice(lengths[0] - 2, lengths[0] - 1)
    expected[sampled_first] = logged[0][sampled_first]
    assert row["routed_experts"] == expected
    # per output token of a turn, and per trained token of the row
    for logged_turn in turns.to_pylist():
        wanted = [[token, token - 1] for token in logged_turn["output_ids"]]
        assert logged_turn["sampling_mask"] == wanted
    assert row["sampling_mask"] == [
        [token, token - 1] if trained else None
        for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True)
    ]


@pytest.mark.parametrize(
    ("payload", "option"),
    [
        ({"routed_experts": experts_of(4, 0)}, "routed_experts=False"),
        ({"sampling_mask": [[1], [2]]}, "sampling_masks=False"),
    ],
)
def test_payloads_are_not_lost_on_the_way(tmp_path, payload, option):
    log = TurnLog(tmp_path)
    with pytest.raises(ValueError, match=option):
        log.append(turn(**payload), 0, set())
    log.close()


@pytest.mark.parametrize(
    ("config", "number"),
    [({"n": 8}, 8), ({"text_config": {"n": 4}}, 4), ({"n": None}, None), ({}, None)],
)
def test_numbers_of_a_model(tmp_path, config, number):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if number is None:
        with pytest.raises(ValueError, match="has no m or n"):
            config_number(tmp_path, "m", "n")
    else:
        assert config_number(tmp_path, "m", "n") == number


def packed(server, experts):
    """Experts as a server packs them."""
    file = io.BytesIO()
    np.save(file, experts)
    flat = experts.astype("<i4").tobytes() if server == "SGLang" else file.getvalue()
    return base64.b64encode(flat).decode()


@pytest.mark.parametrize("server", ["SGLang", "vLLM"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda experts: experts, None),
        (lambda experts: experts[:-1], r"for 15 tokens with 3 a layer"),
        (lambda experts: experts[:, :0], "of shape"),
        (lambda experts: experts - 1, r"in \[-1, 88\]: expected integers"),
        (lambda experts: experts + 2**15, "expected integers in"),
    ],
)
def test_experts_as_servers_pack_them(server, change, match):
    experts = np.arange(15 * 2 * 3, dtype=np.int32).reshape(15, 2, 3)
    text = packed(server, change(experts))
    if match is None:
        found = read_experts(server, text, 16, 3)
        assert (found.dtype, found.tolist()) == (np.int16, experts.tolist())
    else:
        with pytest.raises(EngineError, match=match):
            read_experts(server, text, 16, 3)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (packed("vLLM", np.zeros((15, 6), np.uint8)), r"shape \(15, 6\)"),
        (packed("vLLM", np.zeros((15, 2, 3))), "experts are float64"),
        (packed("vLLM", np.array([[[{}]]], object)), "allow_pickle"),
        ("====", "[Pp]adding|data"),
        ("AAAA", "EOF|pickle|empty"),
        (7, "gave no routed_experts"),
    ],
)
def test_experts_that_cannot_be(text, match):
    with pytest.raises((EngineError, ValueError), match=match):
        read_experts("vLLM", text, 16, 3)
