"""A tree in several packs trains as its rows, one pack in memory at a time."""

import pyarrow as pa
import pytest
import torch

from tests.torch.cases import rows_of
from tests.torch.test_equality import by_parts, by_rows, cut
from tests.torch.tiny_models import (
    float64_throughout,
    gradients,
    make,
    relative,
)
from trajkit.errors import InvalidTurnsError, LayoutError, UnsupportedModelError
from trajkit.torch.attention import (
    CarriedStates,
    TreeAttention,
    block_mask,
    tokens_of,
)
from trajkit.torch.models import carry_backward, carry_logprobs, edge_logprobs
from trajkit.torch.packs import PackDataset, policy_loss


# of the passes without gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kernel", ["masked", "trunk"])
def test_recomputed_activations_hand_gradients_back(reentrant, kernel):
    rows = rows_of("head_dropped")
    model = make("llama")
    packs = cut(rows, 20)
    dataset = PackDataset(packs)
    with float64_throughout():
        _, _, expected = by_rows(model, rows)
        model.enable_input_require_grads()
        enable = getattr(
            model,
            "activation_checkpointing_enable",
            model.gradient_checkpointing_enable,
        )
        enable({"use_reentrant": reentrant})
        for lines in dataset.parts():
            parts = [dataset[line] for line in lines]
            carry_backward(model, parts, policy_loss, kernel=kernel)
        found = gradients(model)
    assert relative(found, expected) < 1e-12


def test_parts_without_an_edge_hand_gradients_back():
    """The prompt of a session fills packs of its own, whose tokens predict nothing."""
    rows = rows_of("siblings")
    packs = cut(rows, 5)
    assert packs["edge_source"].to_pylist()[0] == []
    model = make("qwen3")
    with float64_throughout():
        _, _, grad = by_rows(model, rows)
        _, _, found = by_parts(model, packs)
    assert relative(found, grad) < 1e-12


def test_the_block_mask_of_a_part_is_its_dense_mask():
    packs = cut(rows_of("tail_changed"), 64)
    dataset = PackDataset(packs)
    pack = dataset[1]
    tree = TreeAttention(pack, "cpu", carried=CarriedStates(pack, {}))
    for window in (None, 7):
        dense = tree.mask(window)[0, 0]
        n, n_prefix = len(pack.input_ids), len(pack.prefix_end)
        assert dense.shape == (n, n_prefix + n)
        assert dense[:, :n_prefix].any()
        blocks = block_mask(tree.tokens, tree.keys, torch.device("cpu"), window, 8)
        none = torch.tensor(0)
        q, kv = torch.arange(n), torch.arange(n_prefix + n)
        assert torch.equal(blocks.mask_mod(none, none, q[:, None], kv[None]), dense)
        seen = blocks.to_dense()[0, 0].bool()
        wide = seen.repeat_interleave(8, 0).repeat_interleave(8, 1)
        assert not (dense & ~wide[:n, : n_prefix + n]).any()
    # the prefix is the path to the first token, so the positions of its tokens count up
    assert tokens_of(pack.subtree_end, pack.position_ids)[2, 0] == n_prefix


def first_parts(limit=20):
    dataset = PackDataset(cut(rows_of("tail_changed"), limit))
    return [dataset[line] for line in dataset.parts()[0]]


def test_a_part_alone_is_refused():
    parts, model = first_parts(), make("llama")
    for part in parts:
        with pytest.raises(LayoutError, match="carry_backward or carry_logprobs"):
            edge_logprobs(model, part)
    for wrong, place in [(parts[:-1], len(parts) - 1), (parts[1:], 0)]:
        with pytest.raises(
            LayoutError, match=f"part {place} of {len(parts) - 1} attends"
        ):
            carry_logprobs(model, wrong)
        with pytest.raises(
            LayoutError, match=f"part {place} of {len(parts) - 1} attends"
        ):
            carry_backward(model, wrong, policy_loss)


def test_ratios_of_sequences_are_refused_for_parts():
    parts, model = first_parts(), make("llama")
    with pytest.raises(LayoutError, match="ratio='sequence' needs all edges of a row"):
        carry_backward(model, parts, lambda *args: policy_loss(*args, ratio="sequence"))


def test_parts_that_are_not_in_order_are_refused():
    packs = cut(rows_of("tail_changed"), 20)
    for lines in ([1], [0, 2], [1, 0]):
        with pytest.raises(InvalidTurnsError, match="which must be the line before it"):
            PackDataset(packs.take(lines))
    other = cut(rows_of("head_dropped"), 20)
    mixed = [packs.slice(0, 1), other.slice(2, 1)]
    with pytest.raises(InvalidTurnsError, match="pack 1 continues a tree of pack 1"):
        PackDataset(pa.concat_tables(mixed))


def test_layers_that_run_twice_are_refused():
    parts, model = first_parts(), make("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedModelError, match="LlamaAttention runs twice"):
        carry_backward(model, parts, policy_loss)
