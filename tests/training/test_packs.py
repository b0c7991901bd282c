"""Packs have every trained token once, in the context of its row."""

from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.reference_packs import check_packs, n_distinct
from tests.strategies import runs
from tests.tables import turns_table

POLICIES = ["faithful", "nemo", "per_call", "slime", "trl", "miles"]
OVERSIZE = ["repeat", "carry"]


def rows_of(turns, policy):
    # a prompt of no tokens has a first token that is trained
    turns = [{**turn, "prompt_ids": turn["prompt_ids"] or [1]} for turn in turns]
    return tk.linearize(turns_table(turns), policy)


@given(
    runs(),
    st.sampled_from(POLICIES),
    st.sampled_from(OVERSIZE),
    st.sampled_from(["tree", "rows"]),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.integers(0, 20),
)
def test_packs_have_every_trained_token_in_its_context(
    turns, policy, oversize, layout, suffix, align, more
):
    rows = rows_of(turns, policy)
    lines = rows.to_pylist()
    longest = max((len(row["input_ids"]) for row in lines), default=1)
    limit = longest + more if oversize == "repeat" else 1 + more
    limit += -limit % align
    given = tk.suffix_rows(rows) if suffix else rows
    packs = tk.pack(given, limit, layout=layout, oversize=oversize, align=align)
    check_packs(packs.to_pylist(), lines, limit)
    n = sum(packs["n_tokens"].to_pylist())
    if layout == "rows":
        assert n == sum(len(row["input_ids"]) for row in lines)
    elif oversize == "carry":
        assert n == n_distinct(lines)
