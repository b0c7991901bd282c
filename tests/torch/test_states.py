"""Layers with a state, and layers that choose what they attend, follow trees."""

import copy
import itertools

import pytest
import torch
import transformers
from hypothesis import given

import trajkit as tk
from tests.torch.cases import SESSIONS, pack_of, packs_of, rows_of
from tests.torch.test_equality import assert_equal, by_packs, by_rows
from tests.torch.test_masks import forests, tree
from tests.torch.tiny_models import SIZES, float64_throughout
from trajkit.errors import UnsupportedModelError
from trajkit.torch.attention import Segments, follow_trees, follows, tokens_of
from trajkit.torch.models import carry_logprobs, check_model, edge_logprobs
from trajkit.torch.packs import PackDataset

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "shared_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# with many heads no two tokens are worth exactly nothing
INDEXER = {"index_topk": 7, "index_head_dim": 16, "index_n_heads": 24}
MODELS = {
    "Qwen3-Next": ("Qwen3NextConfig", DELTA | EXPERTS),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5 with experts": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS),
    "OLMo hybrid": ("OlmoHybridConfig", DELTA | TOKENS),
    "Kimi Linear": (
        "KimiLinearConfig",
        DELTA
        | LATENT
        | EXPERTS
        | TOKENS
        | {"linear_num_heads": 2, "linear_head_dim": 8},
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "attention"],
        },
    ),
    "Falcon-H1": ("FalconH1Config", MAMBA),
    "Bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1]}),
    "Granite hybrid": (
        "GraniteMoeHybridConfig",
        MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"]},
    ),
    "Mamba 2": (
        "Mamba2Config",
        {
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "DeepSeek-V3.2": ("DeepseekV32Config", LATENT | EXPERTS | INDEXER | TOKENS),
    "GLM-5": ("GlmMoeDsaConfig", LATENT | EXPERTS | INDEXER | TOKENS),
}


def model_of(name):
    torch.manual_seed(0)
    config, changes = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**SIZES | changes),
        attn_implementation="trajkit",
        experts_implementation="eager",
    )
    return model.double().train()


CASES = {name: ["tail_changed", "nemo"] for name in MODELS} | {"Qwen3.5": SESSIONS}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases]
)
def test_trees_train_as_their_rows(name, case):
    rows, model = rows_of(case), model_of(name)
    with float64_throughout():
        # before the model is changed
        expected = by_rows(model, rows, "eager")
        for packs, options in [
            (packs_of(rows, align=16), {"kernel": "trunk"}),
            (packs_of(rows, cut=True), {}),
        ]:
            # the delta rule solves a triangular system for each 64 tokens
            assert_equal(by_packs(model, packs, **options), expected, 1e-11, 1e-11)
        assert by_rows(model, rows, "eager")[0] == expected[0]


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron-H"])
def test_two_packs_before_a_backward_pass_keep_their_trees(name):
    """Also where layers are computed again in the backward pass."""
    rows, model = rows_of("several_sessions"), model_of(name)
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


def test_one_layer_that_does_not_follow_is_enough_to_refuse_a_model():
    model = model_of("Qwen3.5")
    layer = model.model.layers[0].linear_attn
    follow_trees(model)
    assert follows(layer)
    # a layer around it that keeps the tree for itself
    decoder = model.model.layers[0]
    plain = decoder.forward
    decoder.forward = lambda *args, tree=None, **kwargs: plain(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match="gives a tree other logprobs"):
        edge_logprobs(model, pack_of("nemo"))


@pytest.mark.parametrize("name", ["Qwen3.5", "GLM-5"])
def test_parts_of_a_cut_tree_are_refused(name):
    dataset = PackDataset(tk.pack(rows_of("tail_changed"), 40, oversize="carry"))
    parts = [dataset[k] for k in max(dataset.parts(), key=len)]
    assert len(parts) > 1
    with pytest.raises(
        UnsupportedModelError, match="layers with a state, or that choose"
    ):
        carry_logprobs(model_of(name), parts)


@pytest.mark.parametrize(
    ("config", "changes", "layers"),
    [
        ("MambaConfig", {"state_size": 8}, "MambaMixer"),
        ("MiniMaxConfig", EXPERTS, "MiniMaxLightningAttention"),
        (
            "DeepseekV4Config",
            LATENT | EXPERTS | INDEXER | TOKENS,
            "DeepseekV4Attention",
        ),
        (
            "JambaConfig",
            EXPERTS | {"attn_layer_offset": 1, "attn_layer_period": 2},
            "JambaMambaMixer",
        ),
    ],
)
def test_layers_that_cannot_follow_are_refused_by_name(config, changes, layers):
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**SIZES | changes), attn_implementation="trajkit"
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
