"""A model gives trees, cut or not, the logprobs and gradients that it gives their rows."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import trajkit as tk
from tests.torch.cases import SESSIONS, packs_of, rows_of
from tests.torch.forests import pack_line, packs_table
from tests.torch.tiny_models import (
    CONFIGS,
    float64_throughout,
    gradients,
    largest,
    make,
    relative,
    row_logprobs,
)
from trajkit.torch.attention import TreeAttention, tree_attention
from trajkit.torch.datasets import PackDataset
from trajkit.torch.losses import policy_loss
from trajkit.torch.masks import dense_mask
from trajkit.torch.models import edge_logprobs


def by_rows(model, rows, attention="sdpa"):
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


def differences(model, rows, packs, **options):
    """Of logprobs, of the loss, and of gradients (of the largest)."""
    expected, loss, grad = by_rows(model, rows)
    found, total, found_grad = by_packs(model, packs, **options)
    assert found.keys() == expected.keys()
    a, b = (
        torch.stack([known[key] for key in expected]) for known in (found, expected)
    )
    return largest(a, b), float(abs(loss - total)), relative(found_grad, grad)


@pytest.mark.parametrize("case", SESSIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_trees_train_as_their_rows_in_float64(name, case):
    rows = rows_of(case)
    model = make(name)
    with float64_throughout():
        expected, loss, grad = by_rows(model, rows)
        ways = [
            (packs_of(rows), {}),
            (packs_of(rows), {"kernel": "trunk"}),
            (packs_of(rows, cut=True), {}),
        ]
        for packs, options in ways:
            found, total, found_grad = by_packs(model, packs, chunk_size=7, **options)
            assert found.keys() == expected.keys()
            worst = max(abs(float(found[key] - expected[key])) for key in expected)
            assert worst < 1e-13
            assert float(abs(total - loss)) < 1e-13
            assert relative(found_grad, grad) < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", ["tail_changed", "several_sessions", "nemo"])
def test_trees_train_as_their_rows_in_float32(name, case):
    rows = rows_of(case)
    model = make(name, torch.float32)
    _, _, gradient = differences(model, rows, packs_of(rows))
    assert gradient < 1e-5


@pytest.mark.parametrize("case", SESSIONS)
def test_packs_by_a_trie_train_alike(case):
    rows = rows_of(case)
    listed = rows.to_pylist()
    lines = [pack_line(listed, range(len(listed)), ["advantage"])]
    packs = tk.pack(rows, 10_000, columns=["advantage"])
    model = make("llama")
    with float64_throughout():
        found, loss, grad = by_packs(model, packs)
        expected, total, other = by_packs(model, twin(packs_table(lines), packs.schema))
    assert found.keys() == expected.keys()
    assert max(abs(float(found[key] - expected[key])) for key in expected) < 1e-13
    assert float(abs(loss - total)) < 1e-13
    assert relative(grad, other) < 1e-12


def twin(table, schema):
    """A packs table of these columns, the others empty."""
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table[field.name].cast(field.type))
        elif pa.types.is_large_list(field.type) and not field.nullable:
            columns.append(pa.array([[]] * len(table), field.type))
        else:
            value = 0 if field.name == "n_tokens" else None
            columns.append(pa.array([value] * len(table), field.type))
    return pa.table(columns, schema=schema)


def test_sessions_of_a_group_share_their_prompt():
    rows = tk.linearize(
        tk.from_records(
            {
                "session_id": name,
                "prompt_ids": [1, 2, 3, 4, 5],
                "output_ids": output,
                "output_logprobs": [-0.5] * len(output),
            }
            for name, output in [("a", [6, 7]), ("b", [6, 8]), ("c", [9])]
        )
    )
    group = rows.schema.get_field_index("group_id")
    rows = rows.set_column(group, rows.schema.field(group), pa.array(["g"] * 3))
    rows = rows.append_column("advantage", pa.array([1.0, -0.5, 0.25]))
    packs = packs_of(rows, share="group")
    assert packs["n_tokens"].to_pylist() == [9]
    with float64_throughout():
        logprob, loss, gradient = differences(make("llama"), rows, packs)
    assert logprob < 1e-13
    assert loss < 1e-13
    assert gradient < 1e-12


def test_padding_changes_nothing():
    rows = rows_of("tail_changed")
    packs = packs_of(rows, align=100)
    assert len(packs["input_ids"][0]) > packs["n_tokens"][0].as_py()
    with float64_throughout():
        logprob, _, gradient = differences(make("mistral"), rows, packs)
    assert logprob < 1e-13
    assert gradient < 1e-12


def test_recomputed_activations_give_the_same_gradients():
    rows = rows_of("head_dropped")
    model = make("qwen3")
    with float64_throughout():
        _, _, expected = by_packs(model, packs_of(rows))
        enable = getattr(
            model,
            "activation_checkpointing_enable",
            model.gradient_checkpointing_enable,
        )
        enable()
        _, _, found = by_packs(model, packs_of(rows), kernel="trunk")
    assert relative(found, expected) < 1e-12


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
    (pack,) = PackDataset(packs_of(rows_of("siblings")))
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
