"""Turns in delta form: the stages say of them what they say of the full form."""

from importlib import import_module
from unittest import mock

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import in_delta_form, link_by, policy_of, replaced, turns_table
from tests.oracles import rows as reference
from tests.strategies import pick, policies, runs, thresholds
from trajkit.errors import SchemaError
from trajkit.schema import TURNS, TURNS_DELTA
from trajkit.tables import limits
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.sessions import Sessions

ROUTES = ["messages", "tokens", "previous", "none"]


def drawn_delta(data, table):
    return in_delta_form(table, lambda options: pick(data.draw, options))


def fullest(options):
    """The latest base, and all that it shares."""
    return options[-1]


@given(st.data(), runs(), st.sampled_from(ROUTES), thresholds, st.integers(1, 8))
def test_links_and_drift_are_those_of_the_full_form(
    data, turns, route, threshold, min_run
):
    table = turns_table(turns)
    delta = drawn_delta(data, table)
    links = link_by(delta, route, merge_threshold=threshold)
    assert links == link_by(table, route, merge_threshold=threshold)
    drift = tk.validate(tk.classify_drift(delta, links, min_run=min_run))
    assert drift == tk.classify_drift(table, links, min_run=min_run)


def test_rows_beyond_what_is_made_at_once_are_made_when_they_are_asked_for():
    turns = tk.from_records(
        {"session_id": "s", "prompt_ids": [k], "output_ids": [7]} for k in range(3)
    )
    # the function of the package has the module's name
    plan = import_module("trajkit.rows.plan")
    with (
        mock.patch.multiple(limits, BATCH_TOKENS=1, HELD_ROW_TOKENS=1),
        mock.patch.object(plan, "_structs", wraps=plan._structs) as made,
    ):
        batches = tk.linearize_batches(iter(turns.to_batches()), "per_call")
        assert next(batches).num_rows == 1
        assert made.call_count == 1
        assert sum(batch.num_rows for batch in batches) == 2
    assert made.call_count == 3


def message(text, role="user"):
    said = {"role": role, "content": text}
    return {
        "key": tk.turns.message_key(said),
        "role": role,
        "body": tk.turns.message_record(said)[1],
    }


FULL = {
    "session_id": "a",
    "turn_index": 0,
    "prompt_ids": [1, 2],
    "output_ids": [7, 8],
    "output_logprobs": [-0.5, None],
    "messages": [message("u")],
    "response": message("r", "assistant"),
}


def test_a_refused_turn_may_be_sliced_off():
    """Rules are of the rows that are there, not of the buffers under them."""
    bad = {
        **FULL,
        "turn_index": 1,
        "prompt_ids": [None],
        "messages": [{**message("v"), "key": None}],
    }
    table = pa.Table.from_pylist([FULL, bad, {**FULL, "turn_index": 2}], TURNS)
    for start, stop in ((0, 1), (2, 3)):
        rows = tk.linearize(table.slice(start, stop - start), "slime")
        assert rows["input_ids"].to_pylist() == [[1, 2, 7, 8]]


def nested_at(array, n):
    """The same values, with others before them in every buffer, children's too."""
    if isinstance(array, pa.LargeListArray):
        shifted = array.offsets.to_numpy() + n
        # n items that no list has, in an array that itself begins at item n
        values = pa.concat_arrays([pa.nulls(2 * n, array.values.type), array.values])
        values = values.slice(n)
        mask = array.is_null() if array.null_count else None
        return pa.LargeListArray.from_arrays(
            pa.array(shifted), values, type=array.type, mask=mask
        )
    return pa.concat_arrays([pa.nulls(n, array.type), array]).slice(n)


MASKED = {
    "prompt_ids": [1],
    "output_ids": [2, 3, 4],
    "output_mask": [True, False, True],
}


@given(runs(), policies, st.integers(1, 9), st.integers(1, 40))
@example([MASKED], ("slime", 8), 3, 1)
def test_where_a_table_stands_in_its_buffers_does_not_matter(turns, choice, n, size):
    table = turns_table(turns)
    expected = tk.linearize(table, policy_of(choice))
    names = TURNS.names
    whole = table.select(names).combine_chunks()
    columns = [nested_at(column.combine_chunks(), n) for column in whole.columns]
    moved = pa.Table.from_arrays(columns, names)
    pieces = [moved.slice(k, size) for k in range(0, moved.num_rows, size)]
    for same in (moved, pa.concat_tables([moved.slice(0, 0), *pieces])):
        assert tk.linearize(same, policy_of(choice)) == expected


def test_the_text_under_a_null_finish_reason_does_not_count():
    table = turns_table([{"prompt_ids": [1], "output_ids": [2]}])
    for null in (False, True):
        bits = pa.py_buffer(b"\0" if null else b"\1")
        buffers = [bits, *pa.array(["length"]).buffers()[1:]]
        reasons = pa.Array.from_buffers(pa.string(), 1, buffers)
        assert reasons.to_pylist() == [None if null else "length"]
        rows = tk.linearize(replaced(table, "finish_reason", reasons), "slime")
        assert rows["truncated"].to_pylist() == [not null]


# The two forms as functions of each other


def with_bodies(table, again):
    """The turns table, with a body also where ``again()`` says so.

    A body that stands a second time need not be the one that stood first.
    """
    lines = table.to_pylist()
    for line in lines:
        for said in line["messages"] or []:
            if said["body"] is None and again():
                said["body"] = '"again"'
    return pa.Table.from_pylist(lines, table.schema)


def in_other_layouts(data, table):
    """The same table in chunks, sliced out of a larger one, or from polars' hands."""
    layout = data.draw(st.sampled_from(["plain", "chunks", "slice", "polars"]))
    if layout == "chunks":
        cut = data.draw(st.integers(0, table.num_rows))
        return pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    if layout == "slice":
        return pa.concat_tables([table] * 2).combine_chunks().slice(table.num_rows)
    return pl.DataFrame(table) if layout == "polars" else table


@given(st.data(), runs(), st.integers(1, 60))
def test_compact_and_expand_are_inverses(data, turns, size):
    table = turns_table(turns)
    table = with_bodies(table, lambda: data.draw(st.sampled_from([False] * 3 + [True])))
    notes = [[i] * (i % 3) or None for i in range(table.num_rows)]
    table = table.append_column("notes", pa.array(notes, pa.large_list(pa.int64())))
    with mock.patch.object(limits, "PART_TOKENS", size):
        delta = tk.compact(in_other_layouts(data, table))
        back = tk.expand(in_other_layouts(data, delta))
    delta.validate(full=True)
    back.validate(full=True)
    assert delta.column_names == [*TURNS_DELTA.names, "notes"]
    assert delta.schema.metadata == TURNS_DELTA.metadata
    assert back.schema == table.schema
    assert back == table
    assert tk.compact(back) == delta


@given(runs())
def test_compact_takes_the_base_that_shares_most(turns):
    def shared(turn_index, ids):
        other = session[turn_index]
        return reference.lcp(other["prompt_ids"] + other["output_ids"], ids)

    table, earlier = turns_table(turns), {}
    for line, full in zip(
        tk.compact(table).to_pylist(), table.to_pylist(), strict=True
    ):
        session = earlier.setdefault(full["session_id"], {})
        prompt, path = full["prompt_ids"], full["prompt_ids"] + full["output_ids"]
        most = max((shared(one, prompt) for one in session), default=0)
        assert line["shared_length"] == most
        assert line["suffix_ids"] == prompt[most:]
        if most:
            assert shared(line["base_turn"], prompt) == most
            assert line["base_turn"] == max(session, key=lambda one: shared(one, path))
        else:
            assert line["base_turn"] is None
        session[full["turn_index"]] = full


@given(st.data(), runs())
def test_expand_reads_any_base(data, turns):
    table = turns_table(turns)
    delta = drawn_delta(data, table)
    expected = table.to_pylist()
    for line, n in zip(expected, delta["shared_messages"].to_pylist(), strict=True):
        for said in (line["messages"] or [])[: n or 0]:
            said["body"] = None
    expanded = tk.expand(delta)
    expanded.validate(full=True)
    assert expanded == pa.Table.from_pylist(expected, TURNS)
    # a form that is there already stays
    assert (tk.expand(table), tk.compact(delta)) == (table, delta)


def test_a_long_chain_of_bases_is_followed():
    n, recorder = 1100, tk.Recorder()
    user = {"role": "user", "content": "u"}
    reply = {"role": "assistant", "content": "r"}
    for k in range(n):
        recorder.record(
            "a",
            prompt_ids=[1, *[2, 3] * k],
            output_ids=[2],
            prompt_messages=[user, *[reply] * k],
            response_message=reply,
        )
    delta = recorder.turns("a")
    assert delta["base_turn"].to_pylist() == [None, *range(n - 1)]
    assert delta["shared_messages"].to_pylist() == [0, *range(2, n + 1)]
    full = tk.expand(delta)
    assert full["prompt_ids"][n - 1].as_py() == [1, *[2, 3] * (n - 1)]
    assert len(full["messages"][n - 1]) == n
    assert tk.compact(full) == delta
    assert len(SessionCalls(Sessions.of(delta)).messages(n - 1)) == n


def test_a_message_with_another_role_or_a_body_is_not_shared():
    said, other = message("u"), message("v")
    lines = [
        {**FULL, "messages": [said, other]},
        {**FULL, "turn_index": 1, "messages": [{**said, "role": None, "body": None}]},
        {**FULL, "turn_index": 2, "messages": [{**said, "role": "", "body": None}]},
        {**FULL, "turn_index": 3, "messages": [said]},
        {**FULL, "turn_index": 4, "messages": [{**said, "body": None}, other]},
    ]
    table = pa.Table.from_pylist(lines, TURNS)
    delta = tk.compact(table)
    assert delta["base_turn"].to_pylist() == [None, 0, 0, 0, 0]
    assert delta["shared_messages"].to_pylist() == [0, 0, 0, 0, 1]
    assert tk.expand(delta) == table


def test_a_name_that_the_other_form_uses_is_refused():
    full = pa.Table.from_pylist([FULL], TURNS)
    delta = tk.compact(full)
    column = pa.array([1])
    with pytest.raises(SchemaError, match=r"column 'shared_length' would occur twice"):
        tk.compact(full.append_column("shared_length", column))
    with pytest.raises(SchemaError, match=r"column 'messages' would occur twice"):
        tk.expand(delta.append_column("messages", column))


def test_what_stands_under_a_null_does_not_count():
    user = {"role": "user", "content": "a"}
    delta = tk.compact(
        tk.from_records(
            {
                "session_id": "s",
                "prompt_ids": ids,
                "output_ids": [9],
                "prompt_messages": messages,
            }
            for ids, messages in [([1], [user]), ([1, 9, 2], [user, user])]
        )
    )
    for name in ("base_turn", "shared_messages"):
        value = delta[name][1].as_py()
        column = pa.array(np.array([9, value], np.int32), mask=np.array([True, False]))
        assert np.frombuffer(column.buffers()[1], np.int32)[0] == 9
        other = replaced(delta, name, column)
        assert tk.link(other).equals(tk.link(delta))
        assert tk.linearize(other).equals(tk.linearize(delta))


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_attribution_is_the_same_in_both_forms(kind):
    turns = tk.from_records(
        {"session_id": "s", "prompt_ids": prompt, "output_ids": [3]}
        for prompt in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 3])
    )
    index = pa.array([[0, -1], [None], None], kind(pa.int32()))
    content = pa.array([None, [False], [False, True]], kind(pa.bool_()))
    turns = turns.append_column("prompt_message_index", index)
    turns = turns.append_column("prompt_is_content", content)
    delta = tk.compact(turns)
    for name in ("prompt_message_index", "prompt_is_content"):
        assert delta[name].equals(turns[name])
    assert tk.expand(delta).equals(turns)


def test_a_message_is_not_shared_with_a_base_that_has_another_body_of_it():
    delta = tk.compact(
        tk.from_records(
            {
                "session_id": "s",
                "prompt_ids": prompt,
                "output_ids": [5],
                "prompt_messages": [{"role": "user", "n": n}],
            }
            for prompt, n in [([1, 2], 1), ([9], 1.0), ([1, 2, 3], 1.0)]
        )
    )
    assert delta["base_turn"].to_pylist() == [None, None, 0]
    assert delta["shared_messages"].to_pylist() == [0, 0, 0]
