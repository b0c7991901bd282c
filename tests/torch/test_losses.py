"""Losses over edges are those over rows; logits exist a few sources at a time."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

import trajkit as tk
from tests.torch.cases import SESSIONS, pack_of, packs_of, rows_of
from tests.torch.tiny_models import make
from trajkit.errors import ArgumentError, InvalidTurnsError, LayoutError
from trajkit.torch.models import model_inputs
from trajkit.torch.packs import (
    PackDataset,
    gather_logprobs,
    nll_loss,
    observation_loss,
    policy_loss,
)


def scored(rows):
    """Logprobs of all tokens of the rows, drawn, and those of a pack's edges."""
    lengths = [len(ids) for ids in rows["input_ids"].to_pylist()]
    starts = np.cumsum([0, *lengths])
    values = torch.from_numpy(np.random.default_rng(0).uniform(-2, 0, starts[-1]))
    return values, torch.from_numpy(starts)


def of_edges(pack, values, starts):
    return values[starts[pack.edge_row] + pack.edge_position]


def sum_over(rows, loss, cut=True, **options):
    """The sum of a loss over the packs of the rows, at drawn logprobs."""
    values, starts = scored(rows)
    return sum(
        loss(of_edges(pack, values, starts), pack)
        for pack in PackDataset(packs_of(rows, cut=cut, **options))
    )


@pytest.mark.parametrize("case", SESSIONS)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_policy_loss_is_that_of_the_rows(case, reduce):
    rows = tk.add_weights(rows_of(case), "token" if reduce == "mean" else "rollout")
    values, _ = scored(rows)
    expected = tk.learn.reference_loss(rows, values, reduce=reduce).rl_sum
    found = sum_over(rows, policy_loss, reduce=reduce)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


def by_hand(rows, clip, sequence):
    """The clipped loss, row by row, in plain Python."""
    values, starts = scored(rows)
    total = 0.0
    for k, row in enumerate(rows.to_pylist()):
        places = [j for j, trained in enumerate(row["loss_mask"]) if trained]
        if not places:
            continue
        logs = [float(values[starts[k] + j]) - row["logprobs"][j] for j in places]
        if sequence:
            logs = [sum(logs) / len(logs)] * len(logs)
        a, share = row["advantage"], row["row_weight"] / len(places)
        for x in logs:
            r = np.exp(x)
            clipped = min(max(r, 1 - clip[0]), 1 + clip[1])
            total -= share * min(r * a, clipped * a)
    return total


@pytest.mark.parametrize("case", SESSIONS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.4)])
def test_clipped_ratios_are_those_of_the_rows(case, ratio, clip):
    rows = rows_of(case)
    found = sum_over(rows, lambda x, p: policy_loss(x, p, clip=clip, ratio=ratio))
    expected = by_hand(rows, clip, ratio == "sequence")
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", SESSIONS)
def test_the_likelihood_loss_is_that_of_the_rows(case):
    rows = rows_of(case)
    values, starts = scored(rows)
    expected = 0.0
    for k, row in enumerate(rows.to_pylist()):
        if any(row["loss_mask"]):
            own = values[starts[k] : starts[k + 1]][row["loss_mask"]]
            expected -= row["row_weight"] * float(own.mean())
    assert float(sum_over(rows, nll_loss)) == pytest.approx(expected, rel=1e-12)


def test_the_observation_loss_is_that_of_the_rows():
    rows = rows_of("head_dropped")
    weights = [
        [
            0.25 if at and not trained and at % 3 == 0 else 0.0
            for at, trained in enumerate(mask)
        ]
        for mask in rows["loss_mask"].to_pylist()
    ]
    rows = rows.append_column(
        "observation_weight", pa.array(weights, pa.large_list(pa.float32()))
    )
    values, starts = scored(rows)
    expected = tk.learn.reference_loss(rows, values)
    packs = tk.pack(rows, 1_000, columns=["advantage", "observation_weight"])
    (pack,) = PackDataset(packs)
    logprobs = of_edges(pack, values, starts).requires_grad_()
    observed = observation_loss(logprobs, pack)
    assert observed.item() == pytest.approx(float(expected.observation_sum), rel=1e-12)
    # observed tokens have no recorded logprob and no part in the other term
    assert torch.isnan(pack.edge_logprob).any()
    policy = policy_loss(logprobs, pack, clip=(0.2, 0.2), ratio="token")
    (gradient,) = torch.autograd.grad(policy, logprobs)
    assert torch.isfinite(gradient).all()
    assert not gradient[pack.edge_weight == 0].any()
    unclipped = policy_loss(logprobs, pack)
    assert unclipped.item() == pytest.approx(float(expected.rl_sum), rel=1e-12)
    sequence = policy_loss(logprobs, pack, clip=(0.1, 0.4), ratio="sequence")
    assert sequence.item() == pytest.approx(by_hand(rows, (0.1, 0.4), True), rel=1e-12)


LOSSES = {
    "advantage": policy_loss,
    "score": lambda x, p: policy_loss(x, p, advantage="score"),
    "logprob": policy_loss,
    "old logprob": lambda x, p: policy_loss(x, p, old_logprobs=p.column("old logprob")),
    "row_weight": nll_loss,
    "observation_weight": observation_loss,
}


def with_value(pack, name, edges, value):
    """A pack with this value at some edges of a column."""
    field = {"logprob": "edge_logprob", "row_weight": "edge_weight"}.get(name)
    values = getattr(pack, field) if field else pack.columns["advantage"]
    values = values.clone()
    values[edges] = value
    if field:
        return replace(pack, **{field: values})
    return replace(pack, columns={**pack.columns, name: values})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_values_that_spoil_a_loss_are_refused_with_their_rows(name, value):
    pack = pack_of()
    bad = (pack.edge_row == 1) | (pack.edge_row == 3)
    pack = with_value(pack, name, bad, value)
    edge = int(bad.nonzero()[0])
    where = (
        f"edge {edge} .row {pack.edge_row[edge]}, position {pack.edge_position[edge]}"
    )
    said = "null or NaN" if value != value else value
    pattern = rf"^{name} is {said} for 2 of the pack's rows \(1, 3\), first at {where}"
    zeros = torch.zeros(len(bad), requires_grad=True)
    with pytest.raises(InvalidTurnsError, match=pattern):
        LOSSES[name](zeros, pack)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["advantage", "score", "logprob", "old logprob"])
def test_edges_without_a_weight_may_have_any_value(name, value):
    pack = pack_of()
    unused = pack.edge_row == 2
    pack = with_value(pack, "row_weight", unused, 0.0)
    expected, found = (torch.zeros(len(unused), requires_grad=True) for _ in range(2))
    LOSSES[name](expected, with_value(pack, name, unused, 0.0)).backward()
    LOSSES[name](found, with_value(pack, name, unused, value)).backward()
    assert torch.equal(found.grad, expected.grad)
    assert found.grad.any()


def test_wrong_arguments_are_refused():
    pack = pack_of("clean")
    observed = {**pack.columns, "observation_weight": pack.edge_weight}
    pack = replace(pack, columns=observed)
    for loss in (policy_loss, nll_loss, observation_loss):
        with pytest.raises(
            LayoutError, match=r"logprobs of shape \(3,\) for \d+ edges"
        ):
            loss(torch.zeros(3), pack)
    with pytest.raises(ArgumentError, match="ratio='tokens'"):
        policy_loss(torch.zeros(len(pack.edge_source)), pack, ratio="tokens")


WIDTH, WORDS = 5, 61


def hidden_states(pack, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    n = len(pack.input_ids)
    return torch.randn(n, WIDTH, generator=draw, dtype=dtype), torch.randn(
        WORDS, WIDTH, generator=draw, dtype=dtype
    )


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
@pytest.mark.parametrize("case", ["siblings", "nemo"])
def test_logprobs_are_those_of_all_logits(case, chunk_size):
    pack = pack_of(case)
    shuffled = torch.randperm(
        len(pack.edge_source), generator=torch.Generator().manual_seed(1)
    )
    pack = replace(
        pack,
        edge_source=pack.edge_source[shuffled],
        edge_target=pack.edge_target[shuffled],
    )
    hidden, weight = hidden_states(pack)
    hidden.requires_grad_()
    weight.requires_grad_()
    sizes = []

    def head(states):
        sizes.append(len(states))
        return states @ weight.T

    found = gather_logprobs(
        hidden[None], head, pack, temperature=0.7, chunk_size=chunk_size
    )
    n_sources = len(pack.edge_source.unique())
    assert n_sources < len(pack.edge_source)
    assert max(sizes) <= chunk_size
    assert sum(sizes) == n_sources
    logits = (hidden @ weight.T / 0.7).log_softmax(1)
    expected = logits[pack.edge_source, pack.edge_target]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    share = torch.linspace(-1, 1, len(found), dtype=torch.float64)
    gradients = [
        torch.autograd.grad((x * share).sum(), (hidden, weight))
        for x in (found, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_padding_is_not_the_token_without_an_embedding():
    model = make("llama", pad_token_id=0, head_dim=8)
    model.model.embed_tokens.padding_idx = 0
    padded = PackDataset(packs_of(rows_of("nemo"), align=80))
    pack = padded[0]
    ids = model_inputs(model, pack)["input_ids"][0]
    n = int((pack.input_ids != 0).sum())
    assert len(ids) > n
    assert torch.equal(ids[:n], pack.input_ids[:n])
    assert set(ids[n:].tolist()) == {1}
    assert model_inputs(model, padded.empty_pack())["input_ids"].tolist() == [[1]]
    model.model.embed_tokens.padding_idx = 60
    assert torch.equal(model_inputs(model, pack)["input_ids"][0], pack.input_ids)
