"""Qwen3-Next's linear attention follows trees once it carries its states along them."""

import pytest
import torch
import transformers
from hypothesis import given

from tests.torch.cases import SESSIONS, packs_of, rows_of
from tests.torch.test_equality import by_packs, by_rows
from tests.torch.test_masks import forests, tree
from tests.torch.tiny_models import SIZES, float64_throughout, relative
from trajkit.errors import UnsupportedModelError
from trajkit.torch.linear import Segments, carry_states
from trajkit.torch.masks import token_ranges
from trajkit.torch.models import check_model

LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def qwen3_next():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3NextConfig(**SIZES | LINEAR),
        attn_implementation="trajkit",
        experts_implementation="eager",
    )
    return model.double().train()


@pytest.mark.parametrize("case", SESSIONS)
def test_trees_train_as_their_rows(case):
    rows = rows_of(case)
    model = qwen3_next()
    with float64_throughout():
        # before the model is changed
        expected, loss, grad = by_rows(model, rows)
        carry_states(model)
        for packs, options in [
            (packs_of(rows, align=16), {"kernel": "trunk"}),
            (packs_of(rows, cut=True), {}),
        ]:
            found, total, found_grad = by_packs(model, packs, **options)
            worst = max(abs(float(found[key] - expected[key])) for key in expected)
            # the delta rule solves a triangular system for each 64 tokens
            assert worst < 1e-11
            assert float(abs(total - loss)) < 1e-11
            assert relative(found_grad, grad) < 1e-11


def test_rows_run_as_before():
    rows = rows_of("clean")
    model = qwen3_next()
    expected, loss, grad = by_rows(model, rows)
    carry_states(model)
    found, total, found_grad = by_rows(model, rows)
    assert found == expected
    assert total == loss
    assert torch.equal(found_grad, grad)


def test_a_tree_is_refused_until_states_are_carried():
    model = qwen3_next()
    with pytest.raises(UnsupportedModelError, match=r"does not hand keyword arguments"):
        check_model(model)
    carry_states(model)
    check_model(model)
    # one layer that does not follow is enough to refuse the model
    del model.model.layers[2].linear_attn.forward
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.linear_attn"):
        check_model(model)


@given(forests())
def test_segments_are_the_runs_without_a_branch(parents):
    end, position, _ = tree(parents)
    segments = Segments(token_ranges(end, position), torch.device("cpu"))
    n = len(parents)
    ancestors = segments.ancestors(4)
    for token in range(n):
        at = token
        for k in range(4):
            assert int(ancestors[k, token]) == (at if at >= 0 else n)
            at = parents[at] if at >= 0 else -1
    done, places = {}, []
    for numbers, tokens, filled in segments.batches:
        lengths = filled.sum(1)
        assert int(lengths.max()) < 2 * int(lengths.min())
        for number, line, there in zip(numbers, tokens, filled, strict=True):
            run = line[there].tolist()
            places += run
            before = parents[run[0]]
            assert segments.parent[number] == done.get(before, -1)
            assert (before in done) == (before >= 0)
            assert all(parents[token] == token - 1 for token in run[1:])
        for number, line, there in zip(numbers, tokens, filled, strict=True):
            done[line[there].tolist()[-1]] = number
    assert [places[k] for k in segments.inverse.tolist()] == [*range(n)]
    below = sum(parents.count(t) for t in range(n) if parents.count(t) > 1)
    assert len(segments.parent) == parents.count(-1) + below
