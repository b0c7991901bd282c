"""A model gives trees, cut or not, the logprobs and gradients that it gives their rows."""

import numpy as np
import pytest
import torch

import trajkit as tk
from tests.torch.cases import SESSIONS, pack_of, packs_of, rows_of
from tests.torch.tiny_models import (
    MODELS,
    PLAIN,
    float64_throughout,
    gradients,
    make,
    relative,
    row_logprobs,
)
from trajkit.torch.attention import TreeAttention, dense_mask, tree_attention
from trajkit.torch.models import carry_backward, carry_logprobs, edge_logprobs
from trajkit.torch.packs import PackDataset, policy_loss


def by_rows(model, rows, attention="eager"):
    """Logprobs by (row, position), the loss, and its gradients."""
    logprobs = row_logprobs(model, rows, attention)
    loss = tk.learn.reference_loss(rows, logprobs).rl_sum
    loss.backward()
    lengths = [len(ids) for ids in rows["input_ids"].to_pylist()]
    starts = np.cumsum([0, *lengths])
    known = {
        (row, at): logprobs[starts[row] + at].detach()
        for row, mask in enumerate(rows["loss_mask"].to_pylist())
        for at, trained in enumerate(mask)
        if trained
    }
    return known, loss.detach(), gradients(model)


def by_packs(model, packs, **options):
    known, total = {}, 0.0
    for pack in PackDataset(packs):
        logprobs = edge_logprobs(model, pack, **options)
        loss = policy_loss(logprobs, pack)
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
        places = zip(pack.edge_row.tolist(), pack.edge_position.tolist(), strict=True)
        known |= dict(zip(places, logprobs.detach(), strict=True))
    return known, total, gradients(model)


def cut(rows, limit, **options):
    packs = tk.pack(rows, limit, oversize="carry", columns=["advantage"], **options)
    assert packs["prefix_pack"].null_count < len(packs)
    return packs


def by_parts(model, packs, **options):
    """Logprobs by (row, position), the loss, and its gradients."""
    dataset = PackDataset(packs)
    known, total = {}, 0.0
    for lines in dataset.parts():
        parts = [dataset[line] for line in lines]
        for pack, logprobs in zip(
            parts, carry_logprobs(model, parts, **options), strict=True
        ):
            rows, positions = pack.edge_row.tolist(), pack.edge_position.tolist()
            known |= dict(zip(zip(rows, positions, strict=True), logprobs, strict=True))
        total = total + carry_backward(model, parts, policy_loss, **options)
    return known, total, gradients(model)


def assert_equal(found, expected, bound=1e-13, of_gradients=1e-12):
    """What `by_packs` and `by_rows` give."""
    logprobs, loss, grad = found
    of_rows, loss_of_rows, grad_of_rows = expected
    assert logprobs.keys() == of_rows.keys()
    assert max(abs(float(logprobs[key] - of_rows[key])) for key in of_rows) < bound
    assert float(abs(loss - loss_of_rows)) < bound
    assert relative(grad, grad_of_rows) < of_gradients


CASES = dict.fromkeys(MODELS, ("several_sessions", "nemo"))
CASES |= dict.fromkeys([*PLAIN, "Qwen3.5"], SESSIONS)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases]
)
def test_trees_train_as_their_rows_in_float64(name, case):
    rows = rows_of(case)
    model = make(name)
    # the delta rule solves a triangular system for each 64 tokens
    bounds = (1e-13, 1e-12) if name in PLAIN else (1e-11, 1e-11)
    with float64_throughout():
        expected = by_rows(model, rows)
        for packs, options in [
            (packs_of(rows), {}),
            (packs_of(rows, align=16), {"kernel": "trunk"}),
            (packs_of(rows, cut=True), {"chunk_size": 7}),
        ]:
            assert_equal(by_packs(model, packs, **options), expected, *bounds)
        # a tree in several packs, one of them in memory at a time
        for limit, options in [(20, {}), (13, {"align": 13})] * (name in PLAIN):
            packs = cut(rows, limit, **options)
            assert_equal(by_parts(model, packs, chunk_size=7), expected)
        # and its rows as before
        assert by_rows(model, rows)[0] == expected[0]


def test_an_empty_pack_gives_every_parameter_a_zero_gradient():
    packs = packs_of(rows_of("clean"))
    table = tk.balance(packs, 2, equal_counts=True)
    assert None in table["pack"].to_pylist()
    pack = PackDataset(packs).empty_pack()
    assert pack.column("advantage").shape == (0,)
    model = make("llama")
    for kernel in ("masked", "trunk"):
        policy_loss(edge_logprobs(model, pack, kernel=kernel), pack).backward()
        assert all(p.grad is not None for p in model.parameters())
        assert not gradients(model).any()


@pytest.mark.parametrize("kernel", ["masked", "trunk"])
def test_scores_are_scaled_as_the_layer_asks(kernel):
    pack = pack_of()
    draw = torch.Generator().manual_seed(0)
    n = len(pack.input_ids)
    q, k, v = torch.randn(3, 1, 2, n, 8, generator=draw, dtype=torch.float64)
    tree = TreeAttention(pack, "cpu", kernel)
    found, _ = tree_attention(
        torch.nn.Identity(), q, k, v, None, scaling=2.0, tree=tree
    )
    scores = 2.0 * q @ k.mT
    hidden = ~dense_mask(pack.subtree_end)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found, expected.transpose(1, 2))
