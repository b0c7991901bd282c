"""The usual mistakes with tree packs change logprobs, which equality tests see."""

from dataclasses import replace

import pytest
import torch

from tests.torch.cases import packs_of, rows_of
from tests.torch.faults import FAULTS, ROOT
from tests.torch.tiny_models import float64_throughout, make, row_logprobs
from trajkit.errors import LayoutError
from trajkit.torch.attention import TreeAttention
from trajkit.torch.datasets import PackDataset
from trajkit.torch.losses import gather_logprobs
from trajkit.torch.models import edge_logprobs

BRANCHING = ["tail_changed", "siblings"]


def pack_of(rows):
    return PackDataset(packs_of(rows))[0]


def error(model, rows, pack, logprobs, attention="sdpa"):
    """The largest difference of edges from their tokens in the rows."""
    lengths = torch.tensor([len(ids) for ids in rows["input_ids"].to_pylist()])
    starts = lengths.cumsum(0) - lengths
    with torch.no_grad():
        expected = row_logprobs(model, rows, attention)[
            starts[pack.edge_row] + pack.edge_position
        ]
    return float((logprobs.detach() - expected).abs().max())


@pytest.mark.parametrize("case", BRANCHING)
def test_a_causal_mask_is_caught(case):
    rows = rows_of(case)
    pack, model = pack_of(rows), make("llama")
    n = len(pack.input_ids)
    causal = replace(pack, subtree_end=torch.full_like(pack.subtree_end, n))
    with float64_throughout():
        assert error(model, rows, pack, edge_logprobs(model, pack)) < 1e-13
        assert error(model, rows, pack, edge_logprobs(model, causal)) > 0.05


@pytest.mark.parametrize("case", BRANCHING)
def test_positions_that_count_through_the_pack_are_caught(case):
    rows = rows_of(case)
    pack, model = pack_of(rows), make("llama")
    index = torch.arange(len(pack.input_ids), dtype=torch.int32)
    counted = replace(pack, position_ids=index)
    with float64_throughout():
        assert error(model, rows, pack, edge_logprobs(model, counted)) > 0.05


@pytest.mark.parametrize("case", BRANCHING)
def test_a_window_over_the_pack_is_caught(case):
    rows = rows_of(case)
    pack, model = pack_of(rows), make("mistral")
    with float64_throughout():
        inputs = model_inputs_with_window_by_index(model, pack)
        hidden = model.base_model(**inputs).last_hidden_state
        found = gather_logprobs(hidden, model.lm_head, pack)
        assert error(model, rows, pack, edge_logprobs(model, pack)) < 1e-13
        assert error(model, rows, pack, found) > 0.05


def model_inputs_with_window_by_index(model, pack):
    index = torch.arange(len(pack.input_ids), dtype=torch.int32)
    return {
        "input_ids": pack.input_ids[None],
        "position_ids": pack.position_ids[None],
        "tree": TreeAttention(replace(pack, position_ids=index), "cpu"),
        "use_cache": False,
    }


def test_shifted_labels_are_caught_where_rows_train_the_first_token_after_a_branch():
    """After drift the first token of a branch is context, and hides the mistake."""
    for case, wrong in [("siblings", True), ("tail_changed", False)]:
        rows = rows_of(case)
        pack, model = pack_of(rows), make("llama")
        shifted = replace(pack, edge_target=pack.input_ids[pack.edge_source + 1].long())
        with float64_throughout():
            off = error(model, rows, pack, edge_logprobs(model, shifted))
        assert (off > 0.05) == wrong


@pytest.mark.parametrize("case", BRANCHING)
def test_a_mask_that_transformers_guesses_from_positions_is_caught(case):
    rows = rows_of(case)
    pack, model = pack_of(rows), make("llama")
    model.set_attn_implementation("sdpa")
    with float64_throughout():
        hidden = model.base_model(
            input_ids=pack.input_ids[None],
            position_ids=pack.position_ids[None],
            use_cache=False,
        ).last_hidden_state
        found = gather_logprobs(hidden, model.lm_head, pack)
        assert error(model, rows, pack, found) > 0.05


def test_a_model_without_a_tree_is_refused():
    pack, model = pack_of(rows_of("siblings")), make("llama")
    with pytest.raises(LayoutError, match="LlamaAttention got no tree: call the model"):
        model(input_ids=pack.input_ids[None], position_ids=pack.position_ids[None])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].strip())
def test_planted_faults_have_a_place(fault):
    """`python -m tests.torch.faults` plants them and runs the tests."""
    path, right, wrong, tests = fault
    text = (ROOT / "trajkit" / path).read_text(encoding="utf-8")
    assert text.count(right) == 1
    assert wrong != right
    assert (ROOT / "tests/torch" / tests.split()[0]).exists()
