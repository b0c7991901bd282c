"""Models that cannot train correctly on trees are refused, with what to do."""

import pytest
import torch
import transformers

from tests.torch.cases import packs_of, rows_of
from tests.torch.tiny_models import make
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch.attention import TreeAttention, tree_attention
from trajkit.torch.datasets import PackDataset
from trajkit.torch.models import check_model, model_inputs


def pack_of(case="siblings"):
    return PackDataset(packs_of(rows_of(case)))[0]


def test_a_model_without_a_tree_is_refused():
    pack, model = pack_of(), make("llama")
    with pytest.raises(LayoutError, match="LlamaAttention got no tree: call the model"):
        model(input_ids=pack.input_ids[None], position_ids=pack.position_ids[None])


def refused(model, pattern):
    with pytest.raises(UnsupportedModelError, match=pattern):
        check_model(model)


@pytest.mark.parametrize(
    "name",
    ["flash_attention_2", "flash_attention_3", "sdpa", "eager", "flex_attention", None],
)
def test_other_attention_is_refused(name):
    model = make("llama")
    model.config._attn_implementation = name
    refused(model, rf"runs attention {name!r}, .* model.set_attn_implementation\(")
    with pytest.raises(UnsupportedModelError):
        model_inputs(model, pack_of())


@pytest.mark.parametrize("kind", ["Mamba2Mixer", "GatedDeltaNet", "SSM", "RgLru"])
def test_modules_that_mix_tokens_along_the_pack_are_refused(kind):
    model = make("llama")
    model.model.layers[1].mixer = type(kind, (torch.nn.Identity,), {})()
    refused(model, rf"model.layers.1.mixer \({kind}\) mixes tokens along the pack")


def test_models_that_do_not_hand_down_the_tree_are_refused():
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=32, n_layer=1, n_head=4
    )
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(config)
    model.config._attn_implementation = "trajkit"
    refused(model, "does not hand keyword arguments to its attention layers")


@pytest.mark.parametrize("name", ["mtp", "nextn", "mtp_layers"])
def test_heads_that_predict_several_tokens_are_refused(name):
    model = make("llama")
    model.model.add_module(name, torch.nn.Linear(2, 2))
    refused(model, rf"model.{name} \(Linear\) predicts several tokens ahead")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("nested", [False, True])
def test_rope_of_the_longest_position_is_refused_where_it_changes(kind, nested):
    model, pack = make("llama"), pack_of()
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    n = int(pack.position_ids.max()) + 1
    rope["original_max_position_embeddings"] = n
    model.config.rope_parameters = {"full_attention": rope} if nested else rope
    assert model_inputs(model, pack)["use_cache"] is False
    rope["original_max_position_embeddings"] = n - 1
    pattern = rf"{kind} RoPE, .* from {n - 1} tokens on, and the pack has rows of {n}"
    with pytest.raises(UnsupportedModelError, match=pattern):
        model_inputs(model, pack)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"dropout": 0.1}, "drops attention weights with probability 0.1"),
        ({"position_bias": 1}, "adds a bias that depends on places in the pack"),
        ({"block_indices": 1}, "attends chosen blocks of the pack"),
    ],
)
@pytest.mark.parametrize("kernel", ["masked", "trunk"])
def test_what_attention_cannot_do_is_refused(options, pattern, kernel):
    pack = pack_of()
    tree = TreeAttention(pack, "cpu", kernel)
    x = torch.zeros(1, 2, len(pack.input_ids), 8)
    with pytest.raises(UnsupportedModelError, match=pattern):
        tree_attention(torch.nn.Identity(), x, x, x, None, tree=tree, **options)


def test_a_tree_fits_one_pack_only():
    pack, other = pack_of(), pack_of("nemo")
    tree = TreeAttention(other, "cpu")
    n = len(pack.input_ids)
    x = torch.zeros(1, 2, n, 8)
    with pytest.raises(
        LayoutError, match=f"for a pack of {len(other.input_ids)} tokens"
    ):
        tree_attention(torch.nn.Identity(), x, x, x, None, tree=tree)
    mine = TreeAttention(pack, "cpu")
    two = torch.zeros(2, 2, n, 8)
    with pytest.raises(LayoutError, match="pass one pack a call"):
        tree_attention(torch.nn.Identity(), two, two, two, None, tree=mine)
    with pytest.raises(LayoutError, match=r"an attention mask \(Tensor\) and a tree"):
        tree_attention(torch.nn.Identity(), x, x, x, x, tree=mine)
