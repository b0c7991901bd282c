"""A tree as segments with gathered keys is attended as under its mask.

No kernel of FlashAttention runs on a CPU: its call is made with the function below, whose
causal mask is aligned at the ends as that of FlashAttention 2.1 and later. TRL's own
`TreeRow` and attention are those of the installed package (tested with 1.16.0).
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

import trajkit as tk
from tests.torch.cases import SESSIONS, packs_of, rows_of
from tests.torch.test_masks import WINDOWS, forests, tree
from tests.torch.tiny_models import float64_throughout, make
from trajkit.errors import LayoutError
from trajkit.torch import (
    PackDataset,
    dense_mask,
    edge_logprobs,
    gather_logprobs,
)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    causal,
    softmax_scale=None,
    window_size=(-1, -1),
    deterministic=False,
):
    """The interface of FlashAttention, of tensors of shape (tokens, heads, width)."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    bounds = [itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k)]
    parts = []
    for (a, b), (c, d) in zip(*bounds, strict=True):
        assert b - a <= max_seqlen_q
        assert d - c <= max_seqlen_k
        query, key = torch.arange(b - a)[:, None], torch.arange(d - c)[None]
        ahead = key - query - (d - c - (b - a))
        mask = ahead <= 0
        if window_size[0] >= 0:
            mask &= ahead >= -window_size[0]
        q_, k_, v_ = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        shared = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q_, k_, v_, mask, scale=softmax_scale, enable_gqa=shared
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def attend(layout, q, k, v, **options):
    return flash_attn_varlen_func(
        q,
        k.index_select(0, layout.kv_index),
        v.index_select(0, layout.kv_index),
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        layout.max_seqlen_q,
        layout.max_seqlen_k,
        causal=True,
        **options,
    )


@given(forests(), WINDOWS)
def test_segments_are_attended_as_under_the_mask(parents, window):
    end, position, _ = tree(parents)
    draw = torch.Generator().manual_seed(len(parents))
    q, k, v = (
        torch.randn(len(end), heads, 8, generator=draw, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    for x in (q, k, v):
        x.requires_grad_()
    layout = tk.packs.varlen(end)
    assert layout.kv_index.dtype == torch.int64
    size = (-1, -1) if window is None else (window - 1, 0)
    found = attend(layout, q, k, v, window_size=size)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        dense_mask(end, position, window),
        enable_gqa=True,
    )[0].transpose(0, 1)
    assert float((found - expected).detach().abs().max()) < 1e-14
    share = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    for one, other in zip(
        *(torch.autograd.grad((x * share).sum(), (q, k, v)) for x in (found, expected)),
        strict=True,
    ):
        assert float((one - other).abs().max()) < 1e-13
    # no segment or longest one more than the branches ask for
    n = len(end)
    starts = {b for a, b in itertools.pairwise(range(n)) if parents[b] != a}
    branches = {x + 1 for x in range(n) if parents.count(x) > 1}
    assert {*layout.cu_seqlens_q.tolist()} == {0, n} | starts | branches
    assert layout.max_seqlen_q == max(layout.cu_seqlens_q.diff())
    assert layout.max_seqlen_k == max(layout.cu_seqlens_k.diff())


@pytest.mark.parametrize("case", SESSIONS)
def test_a_pack_a_line_and_its_list_give_one_layout(case):
    table = packs_of(rows_of(case))
    (pack,), line = PackDataset(table), table.to_pylist()[0]
    layouts = [tk.packs.varlen(x) for x in (pack, line, line["subtree_end"])]
    assert isinstance(layouts[1].kv_index, np.ndarray)
    for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k"):
        values = [getattr(layout, name).tolist() for layout in layouts]
        assert values[0] == values[1] == values[2]


@pytest.mark.parametrize(
    ("end", "token"), [([2, 3, 3], 1), ([3, 1, 3], 1), ([4, 4, 4], 0), ([0], 0)]
)
def test_subtrees_that_are_not_nested_are_refused(end, token):
    with pytest.raises(
        LayoutError, match=rf"token {token}: subtree_end is {end[token]}"
    ):
        tk.packs.varlen(end)


def test_parts_of_a_tree_are_refused():
    table = tk.pack(rows_of("tail_changed"), 40, oversize="carry")
    dataset = PackDataset(table)
    for line in max(dataset.parts(), key=len):
        with pytest.raises(
            LayoutError, match=r"pack has (prefix_end|next_source): a tree"
        ):
            tk.packs.varlen(dataset[line])


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("case", ["tail_changed", "siblings", "several_sessions"])
def test_trl_attends_packs_as_its_own_rows(name, case, monkeypatch):
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    kernel = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(packing, "get_target_dtype", lambda *args: None)
    packing.register_tree_attention()
    rows = rows_of(case)
    (pack,) = PackDataset(packs_of(rows))
    own = packing.TreeRow()
    for row in rows.to_pylist():
        own.add(
            {
                "input_ids": torch.tensor(row["input_ids"]),
                "completion_mask": torch.tensor(row["loss_mask"]),
                "old_log_probs": torch.tensor([x or 0.0 for x in row["logprobs"]]),
                "advantage": row["advantage"],
                "group_id": 0,
            }
        )
    trl = own.pack()
    model = make(name)
    with float64_throughout():
        expected = edge_logprobs(model, pack)
        model.set_attn_implementation(packing.TREE_ATTENTION)

        def hidden(ids, positions, layout):
            given = {
                "tree_kv_index": layout.kv_index,
                "tree_cu_seqlens_q": layout.cu_seqlens_q,
                "tree_cu_seqlens_k": layout.cu_seqlens_k,
                "tree_max_seqlen_q": layout.max_seqlen_q,
                "tree_max_seqlen_k": layout.max_seqlen_k,
            }
            return model.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                **given,
            ).last_hidden_state

        states = hidden(pack.input_ids, pack.position_ids, tk.packs.varlen(pack))
        found = gather_logprobs(states, model.lm_head, pack)
        most = trl["tree_max_seqlens"].tolist()
        names = ("kv_index", "cu_seqlens_q", "cu_seqlens_k")
        layout = tk.packs.Varlen(*(trl[f"tree_{n}"] for n in names), *most)
        states = hidden(trl["input_ids"], trl["position_ids"], layout)[0]
        logits = model.lm_head(states).log_softmax(1)
        at = trl["token_index"]
        theirs = logits[at, trl["shift_labels"][at]]
    assert float((found - expected).detach().abs().max()) < 1e-13
    # edges are in the order of rows and positions, as TRL's terms are
    order = np.lexsort((pack.edge_position.numpy(), pack.edge_row.numpy()))
    assert float((found[order] - theirs).detach().abs().max()) < 1e-13
    assert pa.array(trl["advantages"].numpy()).to_pylist() == pytest.approx(
        pack.column("advantage")[order].tolist()
    )
