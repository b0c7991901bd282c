"""Every form of the mask lets the same pairs attend: tokens and their ancestors."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trajkit.errors import LayoutError
from trajkit.torch.attention import (
    TreeAttention,
    block_mask,
    cu_seqlens,
    dense_mask,
    flex_block_mask,
    tokens_of,
)


@st.composite
def forests(draw):
    """The parent of each token, in pre-order; -1 for roots and padding."""
    random = draw(st.randoms(use_true_random=False))
    n = draw(st.integers(1, 150))
    branching = draw(st.sampled_from([0.0, 0.05, 0.3]))
    parents, path = [], []
    for token in range(n):
        if path and random.random() < branching:
            del path[random.randrange(len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


def tree(parents):
    """subtree_end and position_ids, and the ancestors of each token as a matrix."""
    n = len(parents)
    seen = np.eye(n, dtype=bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    end = [int(np.flatnonzero(seen[:, token]).max()) + 1 for token in range(n)]
    position = seen.sum(1) - 1
    as_tensor = [torch.tensor(x, dtype=torch.int32) for x in (end, position)]
    return *as_tensor, torch.from_numpy(seen)


def near(seen, position, window):
    """The pairs that are fewer than ``window`` tokens of the row apart."""
    if window is None:
        return seen
    return seen & (position[:, None] - position[None, :] < window)


WINDOWS = st.sampled_from([None, 1, 7, 40])


@given(forests(), WINDOWS)
def test_dense_masks_are_the_ancestors(parents, window):
    end, position, seen = tree(parents)
    mask = dense_mask(end, position, window)
    assert torch.equal(mask[0, 0], near(seen, position, window))


def pairs_of(mask, by_query):
    """The pairs that a kernel lets attend which walks the lists of a BlockMask."""
    n_q, n_kv = mask.seq_lengths
    size = mask.BLOCK_SIZE[0]
    q, kv = torch.arange(n_q)[:, None], torch.arange(n_kv)[None, :]
    allowed = mask.mask_mod(q, q, q, kv)
    pairs = torch.zeros(n_q, n_kv, dtype=torch.bool)
    times = torch.zeros(n_q, n_kv, dtype=torch.int32)
    side = "kv" if by_query else "q"
    for kind, inside in (("", allowed), ("full_", torch.ones_like(allowed))):
        counts = getattr(mask, f"{kind}{side}_num_blocks")[0, 0]
        indices = getattr(mask, f"{kind}{side}_indices")[0, 0]
        for line, count in enumerate(counts.tolist()):
            for other in indices[line, :count].tolist():
                a, b = (line, other) if by_query else (other, line)
                where = np.s_[a * size : (a + 1) * size, b * size : (b + 1) * size]
                pairs[where] = inside[where]
                times[where] += 1
    assert int(times.max()) <= 1
    return pairs


@given(forests(), WINDOWS, st.sampled_from([4, 16, 128]))
# the window ends before one pair of a block
@example([*range(-1, 7)], 7, 4)
def test_block_masks_are_the_ancestors(parents, window, size):
    end, position, seen = tree(parents)
    mask = flex_block_mask(end, position, window, block_size=size)
    for by_query in (True, False):
        assert torch.equal(pairs_of(mask, by_query), near(seen, position, window))


@given(forests(), st.sampled_from([4, 16]))
def test_block_masks_list_no_block_in_vain(parents, size):
    end, _, seen = tree(parents)
    mask = flex_block_mask(end, block_size=size)
    n = len(end)
    expected = create_block_mask(
        lambda b, h, q, kv: seen[q, kv], 1, 1, n, n, "cpu", BLOCK_SIZE=size
    )
    # torch never calls the last block full if it is cut by the end of the sequence
    blocks = n // size
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        found, wanted = (getattr(x, name)[0, 0, :blocks] for x in (mask, expected))
        assert torch.equal(found, wanted), name


# compiling it would take longer than all other tests
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_block_mask():
    end, position, seen = tree([-1, 0, 1, 2, 1, 4, 0, 6])
    q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    for window in (None, 2):
        mask = flex_block_mask(end, position, window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, near(seen, position, window)
        )
        found = flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(found, expected)


@given(forests(), st.sampled_from([4, 16]))
def test_trunks_come_first_and_branches_see_their_ancestors(parents, size):
    end, position, seen = tree(parents)
    pack = SimpleNamespace(
        subtree_end=end, position_ids=position, prefix_end=(), is_part=False
    )
    bounds, order, places, mask = TreeAttention(pack, "cpu", "trunk").trunks
    assert torch.equal(order[places], torch.arange(len(end)))
    pairs = int(seen.sum())
    roots = []
    for a, b in itertools.pairwise(bounds):
        trunk = order[a:b]
        roots.append(int(trunk[0]))
        assert (b - a) * (b - a + 1) / 2 >= pairs / 100
        assert torch.equal(
            seen[trunk][:, trunk], torch.ones(b - a, b - a).tril().bool()
        )
        deepest = position[trunk[0] : end[trunk[0]]].max()
        assert position[trunk[-1]] == deepest
    for root in {k for k, parent in enumerate(parents) if parent < 0} - {*roots}:
        depth = int(position[root : end[root]].max()) + 1
        assert depth * (depth + 1) / 2 < pairs / 100
    rest = order[bounds[-1] :]
    if mask is None:
        assert not len(rest)
        return
    expected = seen[rest][:, order]
    assert torch.equal(mask[0, 0], expected)
    tokens = tokens_of(end, position)
    sides = tokens[:, rest.numpy()], tokens[:, order.numpy()], torch.device("cpu")
    blocks = block_mask(*sides, block_size=size)
    for by_query in (True, False):
        assert torch.equal(pairs_of(blocks, by_query), expected)


@given(forests())
def test_cu_seqlens_refuse_branches(parents):
    end, _, _ = tree(parents)
    children = [parents.count(token) for token in range(len(parents))]
    if max(children) > 1:
        with pytest.raises(LayoutError, match=r"branches after it, .*flex_block_mask"):
            cu_seqlens(end)
    else:
        roots = [token for token, parent in enumerate(parents) if parent < 0]
        assert cu_seqlens(end).tolist() == [*roots, len(parents)]
