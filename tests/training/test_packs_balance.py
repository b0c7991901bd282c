"""Ranks get every pack once, chains in order, and loads that are near the best."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import ASSIGNMENT


def packs_of(sizes, max_tokens, first=0):
    """A session of one row for each size, which does not fit beside another one."""
    turns = [
        {"session_id": f"s{first + k}", "prompt_ids": [1], "output_ids": [2] * (n - 1)}
        for k, n in enumerate(sizes)
    ]
    rows = tk.linearize(tk.from_records(turns))
    return tk.pack(rows, max_tokens, oversize="carry")


def loads_of(plan, ranks):
    loads = [[] for _ in range(ranks)]
    for line in plan.to_pylist():
        loads[line["rank"]].append(line)
    for lines in loads:
        assert [line["slot"] for line in lines] == [*range(len(lines))]
    return loads


def costs_of(packs, cost):
    """A token costs by itself, and by what it attends."""
    return [
        cost[0] * len(pack["input_ids"])
        + cost[1] * sum(1 + at for at in pack["position_ids"])
        for pack in packs.to_pylist()
    ]


@given(
    st.lists(st.integers(50, 99), min_size=1, max_size=7),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([(24576.0, 2.0), (0.0, 1.0), (1.0, 0.0)]),
)
def test_every_pack_is_on_one_rank_and_loads_are_near_the_best(
    sizes, ranks, equal, cost
):
    packs = packs_of(sizes, 99)
    assert packs.num_rows == len(sizes)
    plan = tk.balance(packs, ranks, cost=cost, equal_counts=equal)
    assert plan.schema.equals(ASSIGNMENT, check_metadata=True)
    costs = costs_of(packs, cost)
    loads = loads_of(plan, ranks)
    found = [line["pack"] for lines in loads for line in lines]
    assert sorted(pack for pack in found if pack is not None) == [*range(len(sizes))]
    for line in plan.to_pylist():
        expected = 0.0 if line["pack"] is None else costs[line["pack"]]
        assert line["cost"] == expected
    for lines in loads:
        filled = [line["cost"] for line in lines]
        assert filled == sorted(filled, reverse=True)
    best = min(
        max(
            sum(c for c, r in zip(costs, chosen, strict=True) if r == k)
            for k in range(ranks)
        )
        for chosen in itertools.product(range(ranks), repeat=len(sizes))
    )
    worst = max(sum(line["cost"] for line in lines) for lines in loads)
    if equal:
        assert {len(lines) for lines in loads} == {-(-len(sizes) // ranks)}
    else:
        assert None not in found
        # Graham's bound
        assert worst <= best * 4 / 3 + 1e-6


def test_equal_counts_are_merged_by_largest_differences():
    packs = packs_of([80, 70, 60, 50, 40], 80)
    for equal, loads in ((False, [130, 170]), (True, [140, 160])):
        plan = tk.balance(packs, 2, cost=(1, 0), equal_counts=equal)
        found = [sum(line["cost"] for line in lines) for lines in loads_of(plan, 2)]
        assert sorted(found) == loads


@pytest.mark.parametrize("equal", [False, True])
def test_parts_of_a_tree_stay_on_one_rank_in_order(equal):
    packs = packs_of([25, 9, 10, 35, 10], 10)
    chains = packs["prefix_pack"].to_pylist()
    assert chains.count(None) < len(chains)
    plan = tk.balance(packs, 3, equal_counts=equal)
    where = {line["pack"]: (line["rank"], line["slot"]) for line in plan.to_pylist()}
    for pack, before in enumerate(chains):
        if before is not None:
            rank, slot = where[before]
            assert where[pack] == (rank, slot + 1)
    if equal:
        loads = loads_of(plan, 3)
        assert len({len(lines) for lines in loads}) == 1


def test_the_parts_of_a_tree_count_as_packs():
    packs = packs_of([45, 9, 10, 9, 10], 10)
    plan = tk.balance(packs, 2, equal_counts=True)
    assert [len(lines) for lines in loads_of(plan, 2)] == [5, 5]


def test_steps_count_from_0_and_share_no_session():
    steps = [packs_of([5, 6], 6), packs_of([4], 6, first=2)]
    plan = tk.balance(steps, 2, equal_counts=True)
    assert [(line["step"], line["pack"]) for line in plan.to_pylist()] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, None),
    ]
    with pytest.raises(
        InvalidTurnsError, match="session 's1' is in packs of steps 0 and 1"
    ):
        tk.balance([steps[0], packs_of([4], 6, first=1)], 2)


def test_what_cannot_be_balanced_is_refused():
    packs = packs_of([15, 3], 10)
    with pytest.raises(InvalidTurnsError, match="pack 0: its prefix_pack 0 is no earl"):
        tk.balance(packs.slice(1), 2)
    with pytest.raises(ArgumentError, match="ranks=0"):
        tk.balance(packs, 0)
    with pytest.raises(ArgumentError, match="cost=-1: expected a finite number"):
        tk.balance(packs, 2, cost=(1, -1))
