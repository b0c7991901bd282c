"""What only a GPU shows: FlexAttention under a tree's masks, and models on CUDA.

Without a GPU every test is skipped. References are in float64 on the CPU, where the other
modules compare them with rows.
"""

import copy
import random

import pytest
import torch
import transformers
from packaging.version import Version

import trajkit as tk
from tests.torch.cases import talk
from tests.torch.test_checks import mask_is_causal
from tests.torch.test_equality import assert_equal, by_packs
from tests.torch.tiny_models import float64_throughout, make
from trajkit.torch import models
from trajkit.torch.attention import LayerMask, TreeAttention, tree_attention
from trajkit.torch.models import check_model, edge_logprobs
from trajkit.torch.packs import PackDataset

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's compiler looks at .grad of every input
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

# The least head that FlexAttention takes on CUDA has 16 numbers.
WIDE = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 4096}
WINDOW = {"sliding_window": 70}
KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOW,
    "Gemma 2, soft caps and a window": WINDOW | {"final_logit_softcapping": 30.0},
    "gpt-oss, sinks and a window": WINDOW,
    "Llama 4, chunks": {"attention_chunk_size": 70},
    "Qwen3.5": {},
    "Granite hybrid": {"mamba_n_heads": 8},
    "DeepSeek-V3": {
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


@pytest.fixture(autouse=True)
def own_kernels():
    """Each test compiles its own kernels, and tries its own models."""
    models._CHECKED.clear()
    torch._dynamo.reset()


def long_rows(shape, n_turns):
    """Rows of some hundred tokens, so that a mask has blocks of every kind."""
    draw = random.Random(shape)
    calls = []
    for name in ("a", "b"):
        turns = talk(draw, name, shape, n_turns)
        before = turns[0]["prompt_ids"] * 25
        for turn in turns:
            turn["prompt_ids"] = before + turn["prompt_ids"]
        calls += turns
    rows = tk.linearize(tk.from_records(calls), "faithful", reward=0.7)
    return rows.append_column("advantage", rows["reward"])


def packs(shape, cut=False, n_turns=6):
    rows = long_rows(shape, n_turns)
    longest = max(map(len, rows["input_ids"].to_pylist()))
    return tk.pack(rows, longest + 4 if cut else 10_000, columns=["advantage"])


def chunks(b, h, q, kv):
    return (kv <= q) & (q // 70 == kv // 70)


MASKS = {
    "plain": (None, {}),
    "window": (LayerMask(70), {}),
    "chunks": (LayerMask(chunks), {}),
    "softcap": (None, {"softcap": 0.8}),
    "sinks": (None, {"s_aux": torch.linspace(-1, 1, 4)}),
}


@pytest.mark.parametrize("kernel", ["masked", "trunk"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", ["tail_changed", "head_dropped"])
def test_attention_is_that_of_a_dense_mask_in_float64(shape, name, kernel):
    pack = PackDataset(packs(shape))[0]
    n = len(pack.input_ids)
    assert n > 256
    mask, options = MASKS[name]
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, n, 32, generator=draw, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, n, 32, generator=draw, dtype=torch.float64)
    weight = torch.randn(1, n, 4, 32, generator=draw, dtype=torch.float64)

    def run(device, dtype):
        inputs = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        given = {
            key: x.to(device, dtype) if isinstance(x, torch.Tensor) else x
            for key, x in options.items()
        }
        module = torch.nn.Identity()
        module.training = True
        tree = TreeAttention(pack, device, kernel)
        out, _ = tree_attention(module, *inputs, mask, tree=tree, **given)
        out.backward(weight.to(device, dtype))
        return [x.detach().double().cpu() for x in (out, *(i.grad for i in inputs))]

    for found, expected in zip(
        run(DEVICE, torch.float32), run("cpu", torch.float64), strict=True
    ):
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def model_of(name):
    return make(name, **WIDE | KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_a_model_trains_as_on_the_cpu(name):
    old = Version(transformers.__version__) < Version("5.24")
    if old and name in ("Qwen3.5", "Granite hybrid"):
        pytest.skip("their layers follow trees with newer transformers")
    model = model_of(name)
    other = copy.deepcopy(model).float().to(DEVICE)
    check_model(other)
    table = packs("tail_changed")
    with float64_throughout():
        expected = by_packs(model, table)
    for kernel in ("masked", "trunk"):
        logprobs, loss, grad = by_packs(other, table, kernel=kernel)
        logprobs = {key: x.double().cpu() for key, x in logprobs.items()}
        found = logprobs, loss.double().cpu(), grad.double().cpu()
        assert_equal(found, expected, 2e-4, 1e-3)


def test_a_tree_that_was_cut_trains_as_a_whole_one():
    model = model_of("qwen3").float().to(DEVICE)
    whole = by_packs(model, packs("tail_changed"))
    parts = packs("tail_changed", cut=True)
    assert len(parts) > 1
    assert_equal(by_packs(model, parts), whole, 2e-4, 1e-3)


def test_activations_that_are_computed_again_attend_the_same_tree():
    model = model_of("mistral").float().to(DEVICE)
    table = packs("head_dropped")
    expected = by_packs(model, table)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(by_packs(model, table), expected, 2e-4, 1e-3)


def test_the_trial_leaves_random_states_and_precision_alone():
    model = model_of("llama").float().to(DEVICE)
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    with torch.autocast(DEVICE, torch.bfloat16):
        check_model(model)
        assert torch.is_autocast_enabled(DEVICE)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_bfloat16_passes_the_trial_and_a_causal_mask_does_not():
    model = model_of("qwen3").to(DEVICE, torch.bfloat16)
    check_model(model)
    mask_is_causal(model)
    with pytest.raises(tk.errors.UnsupportedModelError, match="logprobs"):
        check_model(model, check="always")


def test_packs_of_new_lengths_need_no_new_kernels():
    model = model_of("llama").float().to(DEVICE)
    counters = torch._dynamo.utils.counters
    counters.clear()
    lengths = set()
    for n_turns in range(3, 15):
        (pack,) = PackDataset(packs("tail_changed", n_turns=n_turns))
        lengths.add(len(pack.input_ids))
        edge_logprobs(model, pack, check="never").sum().backward()
    assert len(lengths) == 12
    assert counters["stats"]["unique_graphs"] <= 4


def test_more_kinds_of_layers_than_torch_compiles_by_default():
    pack = PackDataset(packs("tail_changed"))[0]
    n = len(pack.input_ids)
    q = torch.randn(1, 4, n, 32, device=DEVICE)
    k, v = torch.randn(2, 1, 2, n, 32, device=DEVICE)
    tree = TreeAttention(pack, DEVICE)
    dense = TreeAttention(pack, "cpu")
    given = [x.cpu() for x in (q, k, v)]
    for window in range(40, 52):
        # a rule of its own, as each kind of model has
        mask = LayerMask(eval(f"lambda b, h, q, kv: (kv <= q) & (q - kv < {window})"))
        found, _ = tree_attention(torch.nn.Identity(), q, k, v, mask, tree=tree)
        expected, _ = tree_attention(torch.nn.Identity(), *given, mask, tree=dense)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_tensors_are_ids_and_logprobs():
    call = {"prompt_ids": [1, 2], "output_ids": [3], "output_logprobs": [-0.5]}
    given = {name: torch.tensor(each, device=DEVICE) for name, each in call.items()}
    found = tk.from_records([{**given, "session_id": "a"}])
    assert found == tk.from_records([{**call, "session_id": "a"}])
