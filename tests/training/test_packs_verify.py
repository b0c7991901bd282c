"""`verify_packs` finds what is planted, and nothing in packs that are right."""

import copy

import pyarrow as pa
import pytest

import trajkit as tk
from trajkit.errors import SchemaError
from trajkit.schema import PACK_VIOLATIONS, PACKS
from trajkit.turns import content_ids


def recorded():
    """Rows of two sessions that fork, with an advantage."""
    replies = {
        "a": [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 9], [6, 7]), ([1, 2], [8, 8])],
        "b": [([1, 2, 3], [4, 5]), ([1, 2, 3], [4, 6])],
    }
    turns = [
        {
            "session_id": session,
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": [-0.5, -0.25],
        }
        for session, calls in replies.items()
        for prompt, output in calls
    ]
    rows = tk.linearize(tk.from_records(turns), "per_call", reward={"a": 1.0, "b": 0.5})
    return rows.append_column("advantage", rows["reward"])


ROWS = recorded()
# a: 1 2 3 4 5 / 9 6 7 / 8 8, b: 1 2 3 4 5 / 6, padded to 12
PACKED = tk.pack(ROWS, 12, align=4, columns=["advantage"]).to_pylist()
CARRIED = tk.pack(ROWS, 4, oversize="carry").to_pylist()
PLAIN = tk.pack(ROWS, 12, layout="rows", align=4).to_pylist()


def rules_of(packs, **options):
    found = tk.verify_packs(packs, ROWS, **options)
    assert found.schema.equals(PACK_VIOLATIONS, check_metadata=True)
    return set(found["rule"].to_pylist())


def faulty(packs, line, name, at, value):
    """The packs with one value replaced; ``at`` None: all of the list or column."""
    packs = copy.deepcopy(packs)
    if at is None:
        packs[line][name] = value
    else:
        packs[line][name][at] = value
    return packs


def without_edge(packs, line, at):
    packs = copy.deepcopy(packs)
    for name in packs[line]:
        if name.startswith("edge_"):
            del packs[line][name][at]
    return packs


def edge_twice(packs, line, at):
    packs = copy.deepcopy(packs)
    for name in packs[line]:
        if name.startswith("edge_"):
            packs[line][name].append(packs[line][name][at])
    return packs


def test_packs_that_are_right_have_no_violation():
    assert [pack["n_tokens"] for pack in PACKED] == [10, 6]
    assert [len(pack["input_ids"]) for pack in PACKED] == [12, 8]
    assert [pack["prefix_pack"] for pack in CARRIED] == [None, 0, 1, None, 3]
    for packs in (PACKED, CARRIED, PLAIN):
        assert rules_of(packs) == set()
        assert tk.verify_packs(packs, ROWS).num_rows == 0
    assert rules_of(PACKED, max_tokens=12) == set()


OF_PACKED = [
    ("a subtree ends too late", "subtree_end", 4, 8, "context position"),
    ("a subtree ends too soon", "subtree_end", 3, 5, "context position"),
    ("a subtree is not nested", "subtree_end", 7, 10, "subtree_end"),
    ("a subtree ends before it begins", "subtree_end", 5, 5, "subtree_end"),
    ("a subtree spans the padding", "subtree_end", 0, 12, "padding"),
    ("padding attends more than itself", "subtree_end", 10, 12, "padding"),
    ("positions go on at a branch", "position_ids", 5, 5, "position"),
    ("positions are too few", "position_ids", None, [0], "length"),
    ("a session is not named", "sessions", 0, "b", "sessions"),
    ("a token is another one", "input_ids", 1, 7, "context"),
    ("labels are shifted by one", "edge_source", 2, 4, "context"),
    ("a source lacks a token", "edge_source", 1, 2, "context"),
    ("an edge is in the padding", "edge_source", 0, 10, "not_packed range"),
    ("a target is another token", "edge_target", 0, 9, "target"),
    ("an edge is of a row that is not there", "edge_row", 0, 5, "not_packed range"),
    ("a weight counts the row again", "edge_weight", 1, 1.0, "weight"),
    ("a logprob is another one", "edge_logprob", 1, -0.75, "logprob"),
    ("a logprob is lost", "edge_logprob", 1, None, "logprob"),
    ("an advantage is another row's", "edge_advantage", 1, 0.5, "column"),
    ("a list is too short", "edge_position", None, [], "length not_packed"),
]
CAUSAL = [10] * 10 + [11, 12]
OF_ANOTHER_ROW = "column not_packed packed_twice sessions weight"
UNTRAINED = "context logprob not_packed not_trained target weight"
PREFIX = CARRIED[1]["prefix_source"]
PLANTED = {
    **{name: (faulty(PACKED, 0, *place), rules) for name, *place, rules in OF_PACKED},
    "no mask but the causal one": (
        faulty(PACKED, 0, "subtree_end", None, CAUSAL),
        "context position",
    ),
    "an edge is of another row": (faulty(PACKED, 0, "edge_row", 0, 3), OF_ANOTHER_ROW),
    "an edge is of a token that is not trained": (
        faulty(PACKED, 0, "edge_position", 0, 2),
        UNTRAINED,
    ),
    "an edge is missing": (without_edge(PACKED, 1, 0), "not_packed"),
    "an edge is there twice": (edge_twice(PACKED, 1, 0), "packed_twice"),
    "a prefix lacks a token": (
        faulty(CARRIED, 1, "prefix_source", None, PREFIX[:-1]),
        "length prefix",
    ),
    "a prefix is another path": (faulty(CARRIED, 1, "prefix_source", 0, 1), "prefix"),
    "a prefix ends too soon": (
        faulty(CARRIED, 1, "prefix_end", -1, 1),
        "context position",
    ),
    "a prefix is of a later pack": (
        faulty(CARRIED, 1, "prefix_pack", None, 2),
        "prefix",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_found(fault):
    packs, rules = PLANTED[fault]
    assert rules_of(packs) == set(rules.split())


def of_images(*digests):
    """Rows of one session, the prompt of each with one of the images."""
    turns = [
        {
            "session_id": "a",
            "prompt_ids": [1, *content_ids("image", digest, 2).tolist(), 2],
            "output_ids": [k],
            "mm_items": [
                {"kind": "image", "hash": digest, "token_id": 7, "start": 1, "stop": 3}
            ],
        }
        for k, digest in enumerate(digests)
    ]
    return tk.linearize(tk.from_records(turns), "per_call")


IMAGE, OTHER = "ab" * 32, "cd" * 32


@pytest.mark.parametrize(
    ("changed", "token", "words"),
    [
        ({"hash": OTHER}, 1, "which no source of the tokens has"),
        ({"start": 2, "stop": 4}, 1, "is a content id of no item"),
        ({"start": 5, "stop": 7}, 1, "is a content id of no item"),
        ({"token_id": 8}, 1, "which no source of the tokens has"),
        ({"kind": None}, None, "has a null"),
    ],
)
def test_an_image_that_differs_from_the_rows_is_found(changed, token, words):
    rows = of_images(IMAGE, IMAGE)
    packs = tk.pack(rows, 8).to_pylist()
    assert len(packs) == len(packs[0]["mm_items"]) == 1
    assert tk.verify_packs(packs, rows).num_rows == 0
    packs[0]["mm_items"][0] |= changed
    found = tk.verify_packs(packs, rows).to_pylist()
    assert {one["rule"] for one in found} == {"mm_items"}
    assert [one for one in found if one["token"] == token and words in one["detail"]]


def test_an_image_that_a_pack_lacks_is_found():
    rows = of_images(IMAGE, OTHER)
    packs = tk.pack(rows, 8).to_pylist()
    assert tk.verify_packs(packs, rows).num_rows == 0
    second = packs[0]["mm_items"].pop()
    (found,) = tk.verify_packs(packs, rows).to_pylist()
    assert (found["rule"], found["token"]) == ("mm_items", second["start"])
    packs[0]["mm_items"] = None
    (found,) = tk.verify_packs(packs, rows).to_pylist()
    assert (found["rule"], found["token"]) == ("mm_items", 1)
    # another system may name no images at all
    plain = pa.Table.from_pylist(packs, PACKS).drop_columns("mm_items")
    assert tk.verify_packs(plain, rows).num_rows == 0


def test_a_pack_that_is_too_large_is_found():
    found = tk.verify_packs(PACKED, ROWS, max_tokens=8).to_pylist()
    assert [(one["pack"], one["rule"]) for one in found] == [(0, "max_tokens")]


def test_a_violation_names_pack_row_and_values():
    packs = faulty(PACKED, 0, "edge_target", 1, 9)
    assert tk.verify_packs(packs, ROWS).to_pylist() == [
        {
            "pack": 0,
            "token": 3,
            "session_id": "a",
            "row_index": 0,
            "row_token": 4,
            "rule": "target",
            "detail": "edge_target is 9: expected 5",
        }
    ]
    packs = without_edge(without_edge(PACKED, 1, 1), 1, 0)
    assert tk.verify_packs(packs, ROWS).to_pylist() == [
        {
            "pack": None,
            "token": None,
            "session_id": "b",
            "row_index": 0,
            "row_token": 3,
            "rule": "not_packed",
            "detail": "the row trains it, and no pack has its edge, and 1 more",
        }
    ]


def test_packs_of_another_system_need_five_columns():
    names = ["input_ids", "subtree_end", "edge_source", "edge_row", "edge_position"]
    packs = pa.Table.from_pylist(PACKED, PACKS).select(names)
    assert tk.verify_packs(packs, ROWS).num_rows == 0
    # the padding is not known to be padding: it is a tree without edges
    packs = faulty(packs.to_pylist(), 0, "edge_source", 2, 4)
    assert rules_of(packs) == {"context"}
    with pytest.raises(SchemaError, match="no column 'subtree_end'"):
        tk.verify_packs(pa.Table.from_pylist(packs).drop_columns("subtree_end"), ROWS)


def test_a_row_may_be_in_a_pack_twice_if_its_edges_are_not():
    """Another system may repeat a prefix where trajkit shares it."""
    pack = {
        "input_ids": [1, 2, 3, 1, 2, 3, 4],
        "subtree_end": [3, 3, 3, 7, 7, 7, 7],
        "edge_source": [1, 2, 5],
        "edge_row": [0, 0, 0],
        "edge_position": [2, 3, 3],
    }
    turns = [{"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]}]
    rows = tk.linearize(tk.from_records(turns))
    found = tk.verify_packs([pack], rows)["rule"].to_pylist()
    assert found == ["packed_twice"]
    for name in ("edge_source", "edge_row", "edge_position"):
        del pack[name][1]
    assert tk.verify_packs([pack], rows).num_rows == 0
