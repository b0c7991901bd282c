"""The longest common prefix."""

from itertools import product

import numpy as np
from hypothesis import example, given

import trajkit as tk
from tests.oracles import rows as reference
from tests.strategies import prefix_pairs


def ids(values):
    return np.array(values, np.int32)


@given(prefix_pairs())
@example(([], []))
@example(([], [1]))
@example(([1], []))
def test_lcp_is_the_twins(pair):
    a, b = pair
    assert tk.turns.lcp(ids(a), ids(b)) == reference.lcp(a, b)
    assert tk.turns.lcp(ids(b), ids(a)) == reference.lcp(a, b)


# around the sizes at which the kernel changes its step
EDGES = [0, 1, 7, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 4351, 4352, 4353, 8448]


def test_one_changed_token_is_found_in_runs_that_need_not_be_aligned():
    for n, place, start in product(EDGES, EDGES, [0, 1, 3]):
        a = np.arange(n + start, dtype=np.int32)[start:]
        b = np.arange(n + start, dtype=np.int32)[start:]
        assert tk.turns.lcp(a, b) == n
        b[place : place + 1] ^= 1 << place % 31  # every bit counts
        assert tk.turns.lcp(a, b) == min(n, place)


def test_every_token_of_some_pages_counts():
    a = np.zeros(10_000, np.int32)
    b = a.copy()
    for place in range(len(a)):
        b[place] = 1
        assert tk.turns.lcp(a, b) == place
        b[place] = 0
