"""Images in turns: content ids make every stage tell different images apart."""

from itertools import chain

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import linearized, replaced
from tests.strategies import fewer_examples
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.files.tables import decoded, encoded
from trajkit.turns import content_ids, engine_ids

PAD = 7
HASHES = ("ab" * 32, "cd" * 32)
# what a prompt is made of in these tests: an id, or an image as (hash, tokens)
images = st.tuples(st.sampled_from(HASHES), st.integers(1, 3))
symbols = st.integers(0, 2) | images
POLICIES = ("faithful", "strict", "slime", "trl", "nemo", "polar", "per_call")


@st.composite
def sessions(draw):
    """Calls as (prompt symbols, output ids); prompts extend or leave earlier paths."""
    calls = []
    for _ in range(draw(st.integers(1, 5))):
        before = []
        if calls and draw(st.booleans()):
            prompt, output = draw(st.sampled_from(calls))
            path = [*prompt, *output]
            before = path[: draw(st.sampled_from([len(path), len(prompt), 1]))]
        new = draw(st.lists(symbols, min_size=1, max_size=4))
        calls.append(([*before, *new], draw(st.lists(st.integers(0, 2), max_size=3))))
    return calls


def item(content_hash, start, n_tokens):
    return {
        "kind": "image",
        "hash": content_hash,
        "token_id": PAD,
        "start": start,
        "stop": start + n_tokens,
    }


def with_images(prompt):
    """The recorded ids of a prompt, its images, and what the engine consumed."""
    ids, items, consumed = [], [], []
    for symbol in prompt:
        if isinstance(symbol, int):
            ids.append(symbol)
            consumed.append(symbol)
            continue
        content_hash, n_tokens = symbol
        items.append(item(content_hash, len(ids), n_tokens))
        ids += content_ids("image", content_hash, n_tokens).tolist()
        consumed += [PAD] * n_tokens
    return ids, items, consumed


def numbered(prompt):
    """The prompt with numbers of its own for each token of each image."""

    def ids_of(symbol):
        if isinstance(symbol, int):
            return [symbol]
        first = 100 + 10 * (3 * HASHES.index(symbol[0]) + symbol[1])
        return range(first, first + symbol[1])

    return [*chain.from_iterable(map(ids_of, prompt))]


def recorded(calls, **fields):
    return [
        {
            "session_id": "a",
            "prompt_ids": ids,
            "output_ids": output,
            "output_logprobs": [-1.0] * len(output),
            "finish_reason": "stop",
            "mm_items": items or None,
            **fields,
        }
        for (prompt, output) in calls
        for ids, items, _ in [with_images(prompt)]
    ]


def twin_of(calls):
    return tk.from_records(
        {**record, "prompt_ids": numbered(prompt), "mm_items": None}
        for record, (prompt, _) in zip(recorded(calls), calls, strict=True)
    )


def without_ids(rows):
    return rows.drop_columns(["input_ids", "mm_items"])


@given(sessions(), st.none() | st.integers(1, 12))
@fewer_examples
def test_rows_are_those_of_prompts_with_a_number_per_image(calls, cap):
    table, twin = tk.from_records(recorded(calls)), twin_of(calls)
    for policy in POLICIES:
        choices = {"policy": policy, "reward": 1.0, "max_row_tokens": cap}
        rows, report = linearized(table, **choices)
        due, due_report = linearized(twin, **choices)
        assert without_ids(rows) == without_ids(due)
        assert report == due_report
        assert tk.verify(rows, table, policy=policy, max_row_tokens=cap).num_rows == 0
        tk.validate(rows, "rows")
        if policy == "polar":
            continue
        for row in rows.to_pylist():
            ids, items, _ = with_images(calls[row["last_turn"]][0])
            ids += calls[row["last_turn"]][1]
            n_tokens = len(row["input_ids"])
            assert row["input_ids"] == ids[:n_tokens]
            shown = [one for one in items if one["start"] < n_tokens]
            assert row["mm_items"] == (shown or None)


@given(sessions())
def test_links_drift_and_the_delta_form_are_those_of_the_twin(calls):
    table, twin = tk.from_records(recorded(calls)), twin_of(calls)
    links, due = tk.link(table, "slime"), tk.link(twin, "slime")
    assert links == due
    assert tk.classify_drift(table, links) == tk.classify_drift(twin, due)
    delta = tk.compact(table)
    names = ["base_turn", "shared_length"]
    assert delta.select(names) == tk.compact(twin).select(names)
    assert tk.validate(delta) == delta
    assert tk.expand(delta) == table
    consumed = [with_images(prompt)[2] for prompt, _ in calls]
    assert engine_ids(table)["prompt_ids"].to_pylist() == consumed
    shared = delta["shared_length"].to_pylist()
    assert engine_ids(delta)["suffix_ids"].to_pylist() == [
        ids[n:] for ids, n in zip(consumed, shared, strict=True)
    ]


@given(sessions())
@fewer_examples
def test_a_recorder_keeps_images(calls):
    recorder = tk.Recorder()
    for record in recorded(calls):
        recorder.record(**record)
    table = tk.from_records(recorded(calls))
    turns = recorder.pop("a")
    assert tk.expand(turns) == tk.expand(tk.compact(table))
    for policy in POLICIES:
        rows = tk.linearize(table, policy=policy, reward=1.0)
        assert tk.linearize(turns, policy, reward=1.0) == rows
        assert decoded(encoded(rows)) == rows


def broken(**fields):
    (record,) = recorded([([1, (HASHES[0], 2), 2], [3])])
    return {**record, **fields}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mm_items": [item(HASHES[1], 1, 2)]}, "not the content ids"),
        ({"mm_items": [item(HASHES[0], 0, 2)]}, "not the content ids"),
        ({"mm_items": [item(HASHES[0], 3, 2)]}, "is 3:5"),
        ({"mm_items": [item(HASHES[0], 1, 9)]}, "is 1:10: .* from 0 to 4"),
        ({"mm_items": [item(HASHES[0], 1, 0)]}, "is 1:1"),
        ({"mm_items": [item(HASHES[0], 1, 2)] * 2}, "is 1:3"),
        ({"mm_items": [{"kind": "image"}]}, "expected a dict"),
        ({"mm_items": 3}, "expected a list"),
        ({"mm_items": item(HASHES[0], 1, 2)}, "expected a list"),
        ({"mm_items": [{**item(HASHES[0], 1, 2), "hash": None}]}, "null"),
        ({"mm_items": [{**item(HASHES[0], 1, 2), "start": "1"}]}, "start"),
        ({"mm_items": [{**item(HASHES[0], 1, 2), "hash": "../x"}]}, "hash"),
        ({"mm_items": [{**item(HASHES[0], 1, 2), "token_id": 1 << 30}]}, "token_id"),
    ],
)
def test_an_item_that_is_not_in_the_prompt_is_refused(fields, words):
    assert tk.from_records([broken()]).num_rows == 1
    with pytest.raises(InvalidTurnsError, match=words):
        tk.from_records([broken(**fields)])
    recorder = tk.Recorder()
    with pytest.raises(InvalidTurnsError, match=words):
        recorder.record(**broken(**fields))
    assert recorder.sessions == []


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([None], "null"),
        ([item(HASHES[0], 1, 0)], "is 1:1"),
        ([item(HASHES[0], 5, 2)], "is 5:7"),
        ([item(HASHES[1], 1, 2)], "not the content ids"),
        ([item(HASHES[0], 1, 2)] * 2, "is 1:3"),
    ],
)
def test_an_item_that_is_not_in_the_row_is_refused(items, words):
    rows = tk.linearize(tk.from_records([broken()]))
    rows = replaced(rows, "mm_items", [items])
    for read in (tk.validate, lambda rows: tk.pack(rows, 64)):
        with pytest.raises(InvalidTurnsError, match=words):
            read(rows)


def test_a_recorder_copies_items_and_reads_their_numbers():
    recorder, items = tk.Recorder(), [item(HASHES[0], 1, 2)]
    items[0]["start"] = 1.0
    recorder.record(**broken(mm_items=items))
    items[0]["token_id"] = PAD + 1
    (read,) = recorder.turns("a")["mm_items"].to_pylist()
    assert read == [item(HASHES[0], 1, 2)]


def test_a_content_id_without_an_item_has_no_engine_id():
    table = tk.from_records([broken(mm_items=None)])
    with pytest.raises(
        InvalidTurnsError, match=r"prompt_ids\[1\] is \d+, a content id"
    ):
        engine_ids(table)


def test_engine_ids_are_those_of_the_table_s_own_column():
    plain = tk.from_records([broken(prompt_ids=[1, 2], mm_items=None)])
    assert engine_ids(plain) is plain
    table = tk.from_records([broken()])
    ids = engine_ids(table)["prompt_ids"]
    extra = table.append_column("input_ids", pa.array([[1]]))
    assert engine_ids(extra)["prompt_ids"] == ids
    with pytest.raises(SchemaError, match="prompt_ids or suffix_ids or input_ids"):
        engine_ids(table.select(["session_id"]))


def test_stored_tables_have_their_images(tmp_path):
    table = tk.from_records([broken()])
    for name in ("turns.parquet", "turns.arrow", "turns.jsonl"):
        tk.write_turns(table, tmp_path / name)
        read = tk.read_turns(tmp_path / name)
        assert pa.table(read)["mm_items"] == table["mm_items"]
