"""Layers with a state, and layers that choose what they attend, follow trees."""

import copy
import itertools

import pytest
import torch
import transformers
from hypothesis import given

import trajkit as tk
from tests.torch.cases import packs_of, rows_of
from tests.torch.test_masks import forests, tree
from tests.torch.tiny_models import EXPERTS, SIZES, SPARSE, make
from trajkit.errors import UnsupportedModelError
from trajkit.torch.attention import Segments, tokens_of
from trajkit.torch.models import carry_logprobs, check_model, edge_logprobs
from trajkit.torch.packs import PackDataset


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron-H"])
def test_two_packs_before_a_backward_pass_keep_their_trees(name):
    """Also where layers are computed again in the backward pass."""
    rows, model = rows_of("several_sessions"), make(name)
    other = copy.deepcopy(model)
    model.activation_checkpointing_enable()
    packs = [*PackDataset(packs_of(rows, cut=True))]
    assert len(packs) > 1
    sum(edge_logprobs(model, pack).sum() for pack in packs).backward()
    for pack in packs:
        edge_logprobs(other, pack).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["Qwen3.5", "GLM-5"])
def test_parts_of_a_cut_tree_are_refused(name):
    dataset = PackDataset(tk.pack(rows_of("tail_changed"), 40, oversize="carry"))
    parts = [dataset[k] for k in max(dataset.parts(), key=len)]
    assert len(parts) > 1
    with pytest.raises(
        UnsupportedModelError, match="layers with a state, or that choose"
    ):
        carry_logprobs(make(name), parts)


ATTENTION = {"attn_layer_offset": 1, "attn_layer_period": 2}


ZAMBA = {"layer_types": ["linear_attention", "full_attention"], "mamba_d_state": 8}
KEPT = ".forward stores a state, and the layer around it does not hand it the tree"
UNREAD = ".forward does not start from the recurrent state that it stores"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "changes", "layers"),
    [
        ("MambaConfig", {"state_size": 8}, f"MambaMixer{KEPT}"),
        ("ZambaConfig", ZAMBA, f"ZambaMambaMixer{UNREAD}"),
        ("MiniMaxConfig", EXPERTS, "MiniMaxLightningAttention"),
        ("DeepseekV4Config", SPARSE, "DeepseekV4Attention"),
        ("JambaConfig", EXPERTS | ATTENTION, f"JambaMambaMixer{KEPT}"),
    ],
)
def test_layers_that_cannot_follow_are_refused_by_name(config, changes, layers, dtype):
    """Whatever the logprobs of their trial, which small weights do not change."""
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**SIZES | {"initializer_range": 0.02} | changes),
        attn_implementation="trajkit",
        dtype=dtype,
    )
    with pytest.raises(UnsupportedModelError, match=layers):
        check_model(model.eval())


@given(forests())
def test_segments_are_the_runs_without_a_branch(parents):
    end, position, _ = tree(parents)
    segments = Segments(tokens_of(end, position), torch.device("cpu"))
    done, places = {-1: -1}, []
    for numbers, sources, tokens, n_own in segments.batches:
        assert len({source >= 0 for source in sources}) == 1
        for source, line in zip(sources, tokens.tolist(), strict=True):
            # from the state after the token before, which is known
            assert done[parents[line[0]]] == source
            assert all(parents[b] == a for a, b in itertools.pairwise(line))
            # one token with a state would be decoded
            assert len(line) > 1 or source < 0
            places += line[-n_own:]
        for number, line in zip(numbers, tokens.tolist(), strict=True):
            done[line[-1]] = number
    assert [places[k] for k in segments.inverse.tolist()] == [*range(len(parents))]
    below = sum(parents.count(t) for t in range(len(parents)) if parents.count(t) > 1)
    assert len(done) - 1 == parents.count(-1) + below
