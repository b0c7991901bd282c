"""Routed experts and sampling masks, from an engine's reply to rows."""

from dataclasses import replace

import numpy as np
import pytest

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, ScriptedEngine
from tests.shim.sessions.test_turn_log import turn
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.engines.payloads import experts_cell
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


def test_a_turn_without_experts_has_none():
    assert experts_cell(None).to_pylist() == [None]
    assert experts_cell(experts_of(2, 7)).to_pylist() == [
        [[[7, 8, 9], [10, 11, 12]], None]
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


def test_how_many_experts_a_model_has(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"num_experts_per_tok": 8}')
    assert config_number(tmp_path, "num_experts_per_tok") == 8
    config.write_text('{"text_config": {"num_experts_per_tok": 4}}')
    assert config_number(tmp_path, "num_experts_per_tok") == 4
    config.write_text('{"num_experts_per_tok": null}')
    with pytest.raises(ValueError, match="has no num_experts_per_tok"):
        config_number(tmp_path, "num_experts_per_tok")
