"""The experts that tokens were routed to, from an engine's reply to rows."""

from dataclasses import replace

import numpy as np
import pytest

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, ScriptedEngine
from tests.shim.sessions.test_turn_log import turn
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.engines.routed_experts import (
    experts_cell,
    read_experts,
)
from trajkit_shim.errors import EngineError
from trajkit_shim.sessions.turn_log import TurnLog, WrittenTurns


def experts_of(n_tokens, first):
    """Of all tokens but the last, in 2 layers, 3 experts each."""
    numbers = np.arange((n_tokens - 1) * 2 * 3) + first
    return numbers.reshape(-1, 2, 3).astype(np.int16)


class RoutingEngine(ScriptedEngine):
    """Says which experts it routed tokens to: other ones for each call."""

    async def generate(self, request):
        sample = await super().generate(request)
        n_tokens = len(request.prompt_ids) + len(sample.output_ids)
        first = 1000 * len(self.prompts)
        return replace(sample, routed_experts=experts_of(n_tokens, first))


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["full", "delta"])
async def test_experts_go_into_the_log_and_into_rows(tmp_path, form):
    engine = RoutingEngine("a", "b")
    log = {"form": form, "routed_experts": True}
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
    (row,) = tk.linearize(turns, payloads=["routed_experts"], reward=1.0).to_pylist()
    # as the last call read them, but for what the first one sampled and read itself
    expected = logged[1]
    sampled_first = slice(lengths[0] - 2, lengths[0] - 1)
    expected[sampled_first] = logged[0][sampled_first]
    assert row["routed_experts"] == expected


def test_a_turn_without_experts_has_none():
    assert experts_cell(None).to_pylist() == [None]
    assert experts_cell(experts_of(2, 7)).to_pylist() == [
        [[[7, 8, 9], [10, 11, 12]], None]
    ]


def test_experts_are_not_lost_on_the_way(tmp_path):
    log = TurnLog(tmp_path)
    with pytest.raises(ValueError, match="routed_experts=False"):
        log.append(turn(routed_experts=experts_of(4, 0)), 0, WrittenTurns())
    log.close()


@pytest.mark.parametrize("packed", ["a", "====", "\u00e9"])
def test_experts_that_cannot_be_read(packed):
    with pytest.raises(EngineError, match="cannot be read"):
        read_experts(packed, 16, 3)


def test_how_many_experts_a_model_has(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"num_experts_per_tok": 8}')
    assert config_number(tmp_path, "num_experts_per_tok") == 8
    config.write_text('{"text_config": {"num_experts_per_tok": 4}}')
    assert config_number(tmp_path, "num_experts_per_tok") == 4
    config.write_text('{"num_experts_per_tok": null}')
    with pytest.raises(ValueError, match="has no num_experts_per_tok"):
        config_number(tmp_path, "num_experts_per_tok")
