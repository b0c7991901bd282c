"""Which turn each turn continues, against the twin and by hand."""

from typing import get_args

import numpy as np
import pytest

import trajkit as tk
from tests.made_tables import dicts, link_by, turns_table
from tests.oracles import rows as reference
from trajkit import _core
from trajkit._kernel_names import members
from trajkit.errors import LayoutError, PolicyError
from trajkit.policies import ParentBy
from trajkit.rows.linearize import find_links
from trajkit.rows.routes import ROUTES
from trajkit.turns.sessions import Sessions

USER = {"role": "user", "content": "u"}
SYSTEM = {"role": "system", "content": "s"}


def said(text):
    return {"role": "assistant", "content": text}


def call(messages, reply, output=(7,), prompt=(1,), **more):
    return {
        "prompt_messages": messages,
        "response_message": reply,
        "prompt_ids": list(prompt),
        "output_ids": list(output),
        **more,
    }


def parents(turns, **choices):
    """Parents by messages, of links that are the twin's."""
    links = link_by(turns_table(turns), "messages", **choices)
    expected = reference.link(turns, "messages", choices.get("merge_threshold", 1024))
    assert dicts(links, expected) == expected
    return links["parent"].to_pylist()


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param(
            [
                call([USER], said("a")),
                call([USER], said("a")),
                call([USER, said("a"), USER], said("b")),
            ],
            [None, None, 0],
            id="equal siblings: the first is continued",
        ),
        pytest.param(
            [
                call([USER, said("a"), USER], said("b")),
                call([USER], said("a")),
                call([USER, said("a"), USER, said("b"), USER], said("c")),
            ],
            [None, None, 0],
            id="a foreign reply that was there first strands its equal",
        ),
        pytest.param(
            [call([USER], said("a")), call([USER, said("b"), USER], said("c"))],
            [None, None],
            id="a rewritten reply is no parent",
        ),
        pytest.param(
            [
                call([SYSTEM, USER], said("a")),
                call([SYSTEM, USER, said("a")], said("b")),
            ],
            [None, 0],
            id="a prompt that ends with the reply (prefill)",
        ),
        pytest.param(
            [
                call([USER], {"role": "assistant", "calls": [{"n": 1}]}),
                call([USER, {"role": "assistant", "calls": [{"n": True}]}], said("b")),
                call([USER, {"role": "assistant", "calls": [{"n": "1"}]}], said("b")),
            ],
            [None, 0, None],
            id="messages are equal as Python's dicts are",
        ),
        pytest.param(
            [
                call([USER], None),
                call([USER, said("a"), USER], said("b")),
            ],
            [None, None],
            id="a reply that could not be told is taken for rewritten",
        ),
        pytest.param(
            [
                call([USER], said("a"), output=[7, 8], prompt=[1]),
                call(None, said("b"), output=[9], prompt=[1, 7, 8, 2]),
                call(None, said("b"), output=[9], prompt=[1, 7, 8, 2, 9, 3]),
                call(None, said("b"), output=[9], prompt=[2, 7, 8, 2, 9, 3]),
            ],
            [None, 0, 1, None],
            id="without messages: the longest held prefix",
        ),
        pytest.param(
            [
                call([USER], said("a"), output=[7], prompt=[1]),
                call(None, said("b"), output=[9], prompt=[1, 7, 2]),
                call([USER, said("b"), USER], said("c"), prompt=[1, 7, 2, 9, 3]),
            ],
            [None, 0, None],
            id="a turn routed by tokens matches no message",
        ),
        pytest.param(
            [
                call([USER], said("a"), output=[7], prompt=[1]),
                call([], said("b"), output=[9], prompt=[1, 7]),
                call(None, said("c"), output=[9], prompt=[1, 7, 9]),
            ],
            [None, None, 0],
            id="an empty list of messages is passed over",
        ),
        pytest.param(
            [
                call([USER], said("a"), output=[7, 8]),
                call([USER], said("b"), output=[7, 9]),
                call(None, said("c"), prompt=[1, 7, 2]),
            ],
            [None, None, 0],
            id="of equal prompts repeated as far, the first",
        ),
        pytest.param(
            [
                call([USER], said("a")),
                call([USER, said("a"), USER], said("b")),
                call([USER, said("c"), USER], said("d")),
            ],
            [None, 0, None],
            id="a reply that was continued is not rewritten",
        ),
        pytest.param(
            [
                call([USER], said("a")),
                call([USER], said("b")),
                call([USER, said("c"), USER], said("d")),
            ],
            [None, None, None],
            id="a reply with siblings is not rewritten",
        ),
        pytest.param(
            [
                call([USER], said("a"), output=[7], prompt=[1]),
                call(None, said("x"), prompt=[5]),
                call([USER, said("b"), USER], said("c"), prompt=[3]),
                call(None, said("x"), prompt=[1, 7, 9]),
                call(None, said("x"), prompt=[5, 7, 9]),
            ],
            [None, None, None, None, 1],
            id="without messages: a call that was rewritten is not continued",
        ),
    ],
)
def test_parents_by_hand(turns, expected):
    assert parents(turns) == expected


def test_of_equal_ends_the_oldest_chain_is_continued_by_tokens():
    turns = [call(None, None, (2,), ids) for ids in ([1], [1], [1, 2, 3], [1, 2, 4])]
    links = link_by(turns_table(turns), "tokens")
    assert links["parent"].to_pylist() == [None, None, 0, 1]


def test_every_way_to_find_parents_has_a_function():
    assert tuple(ROUTES) == get_args(ParentBy)


@pytest.mark.parametrize(
    ("outputs", "shown", "parent"),
    [
        ([(4, 5), (6, 7), (6, 8), (6, 9)], (6, 8, 1), 2),
        # the same number of tokens of each: the shortest path, repeated entirely or not
        ([(6, 7, 8), (6, 7), (6, 7)], (6, 7, 9), 1),
        ([(6, 7, 8), (6, 7), (6, 8)], (6, 9), 1),
        # equal paths: the first
        ([(4, 5), (6, 7), (6, 7), (6, 7)], (6, 7, 9), 1),
        ([(6, 7), (6, 7), (6, 7)], (3,), 0),
    ],
)
def test_tokens_choose_among_equal_replies(outputs, shown, parent):
    turns = [call([USER], said("x"), output) for output in outputs]
    turns.append(call([USER, said("x"), USER], said("y"), prompt=(1, *shown)))
    links = link_by(turns_table(turns), tie_break="tokens")
    assert links["parent"].to_pylist()[-1] == parent
    expected = reference.link(turns, "messages", 0, "tokens")
    assert expected[-1]["parent"] == parent


def test_rewrite_names_the_turn_that_it_demotes():
    turns = [
        call([USER], said("a"), turn_index=3),
        call([USER, said("b"), USER], said("c"), turn_index=5),
    ]
    links = link_by(turns_table(turns)).to_pylist()
    assert [line["rewritten_by"] for line in links] == [5, None]
    assert [line["order"] for line in links] == [None, 0]
    assert links[1]["link_reason"] == "rewrite"


@pytest.mark.parametrize(
    ("n_output", "threshold", "rewritten"),
    [
        pytest.param(3, 4, True, id="shorter"),
        pytest.param(3, 3, False, id="as long"),
        pytest.param(0, 0, False, id="off"),
        pytest.param(1023, 1024, True, id="just below slime's"),
        pytest.param(1024, 1024, False, id="slime's"),
    ],
)
def test_only_a_short_reply_gives_way(n_output, threshold, rewritten):
    turns = [
        call([USER], said("a"), output=[7] * n_output),
        call([USER, said("b"), USER], said("c")),
    ]
    links = link_by(turns_table(turns), merge_threshold=threshold).to_pylist()
    assert (links[0]["rewritten_by"] is not None) is rewritten


def test_depth_first_order_is_not_turn_order():
    turns = [
        call([USER], said("a")),
        call([SYSTEM], said("b")),
        call([USER, said("a"), USER], said("c")),
    ]
    links = link_by(turns_table(turns)).to_pylist()
    assert [line["order"] for line in links] == [0, 2, 1]


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(PolicyError, match="'sideways' does not exist"):
        tk.link(turns_table([call([USER], said("a"))]), "sideways")


@pytest.mark.parametrize("name", ["faithful", "slime", "nemo", "polar", "graph"])
def test_links_are_those_of_the_rows_of_the_policy(name):
    turns = turns_table([call([USER], said("a")), call([USER, said("b"), USER], None)])
    links = tk.link(turns, name)
    assert links == tk.link(turns, tk.policy(name))
    assert tk.linearize(turns, name, links=links) == tk.linearize(turns, name)
    assert (links["rewritten_by"].null_count == 2) is (name != "slime")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"parent": 1}, "parent 1 is no other call", id="itself"),
        pytest.param({"parent": 1 << 30}, "is no other call", id="far outside"),
        # their paths have no node in common: a climb to it would not end
        pytest.param({"parent": 2}, "2 is no other call of its session", id="the next"),
        pytest.param({"parent": 0}, "which has the calls 1 to 1", id="the one before"),
        pytest.param({"lcp": 3}, "not within both paths", id="lcp beyond the prompt"),
        pytest.param({"lcp": -1}, "not within both paths", id="lcp below 0"),
    ],
)
def test_kernels_refuse_links_that_lead_outside(change, match):
    session = "second" if change.get("parent") == 0 else "s"
    calls = Sessions.of(
        turns_table(
            [
                {"prompt_ids": [1], "output_ids": [2]},
                {"prompt_ids": [1, 2], "output_ids": [3], "session_id": session},
                {"prompt_ids": [1, 2, 3], "output_ids": [4], "session_id": "later"},
            ]
        )
    )
    forest = calls.forest
    links = find_links(calls, forest, tk.policy("trl"))
    for name, value in change.items():
        links[name][1] = value
    if "parent" in change:
        with pytest.raises(LayoutError, match=match):
            _core.measure_links(forest.paths, links)
    out = np.zeros((len(members("DRIFT_")), len(links)), np.int64)
    with pytest.raises(LayoutError, match=match):
        _core.describe_drift(forest.paths, links, 8, out)


@pytest.mark.parametrize(
    ("call", "other", "match"),
    [
        (-1, 0, "call is -1: expected one of 2"),
        (0, 2, "call is 2: expected one of 2"),
    ],
)
def test_kernels_refuse_calls_that_lead_outside(call, other, match):
    turns = [{"prompt_ids": [1], "output_ids": [2], "session_id": s} for s in "ab"]
    paths = Sessions.of(turns_table(turns)).forest.paths
    assert _core.shared_length(paths, 0, 0) == 1
    assert _core.shared_length(paths, 0, 1) == 0  # of another session
    with pytest.raises(LayoutError, match=match):
        _core.shared_length(paths, call, other)
    for look in (_core.TokenIndex(paths).add, _core.TokenIndex(paths).find):
        with pytest.raises(LayoutError, match=match):
            look(min(call, other) if call < 0 else other)
