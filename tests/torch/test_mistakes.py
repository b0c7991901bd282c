"""Planted faults, and what a model without a tree says."""

import pytest
import torch

from tests.faults_export import ROOT
from tests.torch.cases import packs_of, rows_of
from tests.torch.faults import FAULTS
from tests.torch.tiny_models import make, row_logprobs
from trajkit.errors import LayoutError
from trajkit.torch.datasets import PackDataset


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


def test_a_model_without_a_tree_is_refused():
    pack, model = pack_of(rows_of("siblings")), make("llama")
    with pytest.raises(LayoutError, match="LlamaAttention got no tree: call the model"):
        model(input_ids=pack.input_ids[None], position_ids=pack.position_ids[None])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].strip())
def test_planted_faults_have_a_place(fault):
    """`python -m tests.torch.faults` plants them and runs the tests."""
    path, right, wrong, tests = fault
    assert (ROOT / "trajkit" / path).read_text("utf-8").count(right) == 1
    assert wrong != right
    assert (ROOT / tests.split()[0]).exists()
