"""The prefix kernel, on two runs that differ only at the end."""

import numpy as np
import pytest

import trajkit as tk


@pytest.mark.parametrize("n_tokens", [1_024, 131_072, 4_194_304])
def test_lcp(benchmark, n_tokens):
    a = np.random.default_rng(0).integers(0, 2**31, n_tokens, dtype=np.int32)
    b = a.copy()
    b[-1] ^= 1
    assert benchmark(tk.turns.lcp, a, b) == n_tokens - 1
