"""Stages over streams: what a table gives, however it is cut, and little of it held."""

import inspect
import itertools
import weakref
from collections import deque

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import linearized, replaced, streamed, turns_table
from tests.strategies import fewer_examples, pick, runs
from trajkit import schema
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.tables import limits
from trajkit.tables.columns import empty_batch
from trajkit.tables.stages import batches_of

BY_TOKENS = tk.policy("faithful", parent_by="tokens")


def spoken(turns):
    """The turns with other ids, and no prompt without one."""
    return [
        {
            **turn,
            "prompt_ids": [97 + k for k in turn["prompt_ids"] or [0]],
            "output_ids": [97 + k for k in turn["output_ids"]],
        }
        for turn in turns
    ]


def advantages_of(turns):
    names = turns["session_id"].unique()
    return pa.table({"session_id": names, "advantage": np.arange(len(names)) / 2})


def turn_rewards_of(turns):
    given = turns.select(["session_id", "turn_index"])
    zeros = pa.array(np.zeros(turns.num_rows))
    return given.append_column("reward", zeros)


SPREAD = tk.learn.spread_rewards
# Each stage, what it takes, and its options, some of which depend on turns and rows.
STAGES = {
    "link": (tk.link, "turns", {}),
    "link by tokens": (tk.link, "turns", {"policy": BY_TOKENS}),
    "validate": (tk.validate, "turns", {"kind": "turns", "bodies": False}),
    "validate, whatever it is": (tk.validate, "turns", {"bodies": False}),
    "compact": (tk.compact, "turns", {}),
    "expand": (tk.expand, "delta", {}),
    "weigh": (tk.add_weights, "rows", {"weigh_by": "row"}),
    "validate rows": (tk.validate, "rows", {}),
    "spread_rewards": (SPREAD, "rows", {"mode": "uniform"}),
    "spread_rewards of turns": (
        SPREAD,
        "rows",
        {"mode": "per_turn", "turn_rewards": turn_rewards_of},
    ),
    "spread_rewards of last turns": (
        SPREAD,
        "rows",
        {"mode": "last_turn", "turn_rewards": turn_rewards_of},
    ),
    "add_advantages": (tk.add_advantages, "rows", {"sessions": advantages_of}),
    "verify": (tk.verify, "both", {}),
    "verify with a policy": (tk.verify, "both", {"policy": "faithful"}),
    "linearize": (tk.linearize, "turns", {}),
}


def stage_of(name, turns, policy="faithful"):
    """The two forms of a stage, the tables that it takes, and its options."""
    stage, kind, options = STAGES[name]
    batches = getattr(stage, "batches", None)
    rows = tk.linearize(turns, policy, reward=1.0)
    tables = {
        "turns": [turns],
        "delta": [tk.compact(turns)],
        "rows": [rows],
        "both": [rows, turns],
    }[kind]
    options = {n: one(turns) if callable(one) else one for n, one in options.items()}
    return (
        stage,
        batches or getattr(tk, f"{stage.__name__}_batches"),
        tables,
        options,
    )


def cut(choose, table):
    """The table in batches, cut anywhere, perhaps with empty ones between."""
    cuts = sorted(choose(range(table.num_rows + 1)) for _ in range(choose(range(6))))
    edges = [0, *cuts, table.num_rows]
    table = table.combine_chunks()
    return [
        pa.RecordBatch.from_arrays(
            [column.combine_chunks() for column in part.columns], schema=part.schema
        )
        for start, stop in itertools.pairwise(edges)
        for part in [table.slice(start, stop - start)]
    ]


def chooser(data):
    return lambda options: pick(data.draw, options)


def lines(batches):
    return [line for batch in batches for line in batch.to_pylist()]


def spoiled(choose, rows):
    """Rows with a fault here and there: a mask, an id, a weight, a row too few."""
    rows = rows.to_pylist()
    for row in rows:
        if row["input_ids"] and choose([False, False, True]):
            k = choose(range(len(row["input_ids"])))
            fault = choose(["mask", "id", "weight"])
            if fault == "mask":
                row["loss_mask"][k] = not row["loss_mask"][k]
            elif fault == "id":
                row["input_ids"][k] = 77
            else:
                row["row_weight"] = 0.125
    if rows and choose([False, True]):
        del rows[choose(range(len(rows)))]
    rows = pa.Table.from_pylist(rows, schema.ROWS)
    foreign = ["session_id", "input_ids", "loss_mask", "logprobs"]
    return rows.select(choose([rows.column_names, foreign]))


@pytest.mark.parametrize("name", STAGES)
@fewer_examples
@given(data=st.data(), turns=runs())
def test_a_stage_gives_of_streams_what_it_gives_of_tables(name, data, turns):
    choose, table = chooser(data), turns_table(spoken(turns))
    policy = choose(["faithful", "slime"])
    if choose([False, True]):  # integers are names of sessions, too
        numbers = table["session_id"].combine_chunks().dictionary_encode().indices
        table = replaced(table, "session_id", numbers)
    stage, batches, tables, options = stage_of(name, table, policy)
    if name.startswith("verify"):
        tables = [spoiled(choose, tables[0]), tables[1]]
    streams = [iter(cut(choose, one)) for one in tables]
    at = choose([None, 0, 1]) if len(tables) == 2 else None
    if at is not None:
        streams[at] = tables[at]  # one of them may be a table
    expected = stage(*tables, **options).to_pylist()
    named = zip(inspect.signature(batches).parameters, streams, strict=False)
    assert lines(batches(**dict(named), **options)) == expected


# --- verify


@given(data=st.data(), turns=runs(), extra=st.sampled_from(["", "z"]))
def test_rows_of_sessions_without_turns_are_named_at_the_end(data, turns, extra):
    table, choose = turns_table(turns), chooser(data)
    rows = tk.linearize(table)
    names = [f"{name}{extra}x" for name in rows["session_id"].to_pylist()]
    rows = pa.concat_tables([rows, replaced(rows, "session_id", names)])
    batches = tk.verify_batches(iter(cut(choose, rows)), iter(cut(choose, table)))
    whole = tk.verify(rows, table)
    assert lines(batches) == whole.to_pylist()
    assert whole.num_rows == rows.num_rows // 2


ONE = {"prompt_ids": [1], "output_ids": [2], "output_logprobs": [-1.0]}


def three():
    table = tk.from_records([{"session_id": name, **ONE} for name in "abc"])
    return table, tk.linearize(table)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 1, 0], [0, 3, 1, 2], [3, 1, 3]])
def test_rows_may_be_in_another_order_than_turns(order):
    """Sessions without turns, and those that come back, are named at the end."""
    turns, rows = three()
    lone = tk.linearize(tk.from_records([{"session_id": "x", **ONE}]))
    rows = pa.concat_tables([rows, lone]).take(order)
    found = lines(tk.verify_batches(rows, turns.to_reader(max_chunksize=1), "faithful"))
    whole = tk.verify(rows, turns, "faithful").to_pylist()
    assert sorted(map(repr, found)) == sorted(map(repr, whole))
    assert [one["rule"] for one in found].count("session") == sum(
        (3 in order, order[2] == order[0], order.count(3) == 2)
    )


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({}, "session_id is absent or null"),
        ({"session_id": ["a", None, "c"]}, "absent or null"),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_rows_that_cannot_be_told_apart_are_refused(columns, match, size):
    turns, rows = three()
    plain = rows.select(["input_ids", "loss_mask"])
    for name, values in columns.items():
        plain = plain.append_column(name, pa.array(values))
    with pytest.raises(SchemaError, match=match):
        list(tk.verify_batches(plain.to_reader(max_chunksize=size), turns))


def test_rows_of_several_forms_are_refused_in_a_stream():
    turns, rows = three()
    plain = rows.select(["session_id", "input_ids", "loss_mask"])
    numbered = rows.select(["session_id", "row_index", "input_ids", "loss_mask"])
    for some in ([rows, plain], [numbered, plain]):
        batches = (batch for table in some for batch in table.to_batches())
        with pytest.raises(SchemaError, match="rows of several forms one by one"):
            list(tk.verify_batches(batches, turns))


def test_links_of_other_sessions_are_refused():
    turns, _ = three()
    links = tk.link(turns)
    with pytest.raises(InvalidTurnsError, match="links has 3 rows for 2 turns"):
        tk.classify_drift(turns[:2], links)
    with pytest.raises(SchemaError, match="list_iterator is not a table"):
        tk.classify_drift(iter(turns.to_batches()), links)


@pytest.mark.parametrize(
    "call",
    [
        lambda b: tk.link_batches(b, "nowhere"),
        lambda b: tk.linearize_batches(b, threads=0),
        lambda b: tk.add_weights_batches(b, "turn"),
        lambda b: tk.verify_batches(b, b, "slim"),
        lambda b: tk.pack_batches(b, 0),
        lambda b: tk.validate_batches(b, nonfinite_logprobs="zero"),
        lambda b: tk.validate_batches(b, "zzz"),
        lambda b: tk.linearize_batches(b, payloads="zzz"),
        lambda b: tk.linearize_batches(b, report="zzz"),
        lambda b: tk.verify_batches(b, b, weigh_by="zzz"),
    ],
)
def test_options_are_checked_before_a_stream_is_read(call):
    def batches():
        raise AssertionError("the stream is read")
        yield

    with pytest.raises(ArgumentError):
        call(batches())


def test_the_form_for_tables_refuses_an_iterator():
    turns, _ = three()
    for stage in (tk.link, tk.compact, tk.validate):
        with pytest.raises(SchemaError, match=f"{stage.__name__}_batches an iterator"):
            stage(iter(turns.to_batches()))


# --- what is held


class Counted:
    """A stream of a table, a session a batch, that counts what is alive of it."""

    def __init__(self, table):
        names = table["session_id"].to_pylist()
        edges = [k for k, name in enumerate(names) if not k or name != names[k - 1]]
        self._parts = [
            table.slice(start, stop - start).combine_chunks()
            for start, stop in itertools.pairwise([*edges, len(names)])
        ]
        self.sizes = len(self._parts)
        self.alive = self.most = 0

    def __iter__(self):
        for part in self._parts:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_table(part)
            # what is read of the buffer keeps the array alive, and nothing else does
            memory = np.frombuffer(sink.getvalue(), np.uint8).copy()
            weakref.finalize(memory, self._gone)
            self.alive += 1
            self.most = max(self.most, self.alive)
            reader = pa.ipc.open_stream(pa.py_buffer(memory))
            del memory
            yield reader.read_next_batch()
            del reader

    def _gone(self):
        self.alive -= 1


def many_sessions(n=30):
    generated = generated_runs(n, 3, max_turns=4)
    return turns_table(spoken(generated))


@pytest.mark.parametrize("name", [name for name in STAGES if name != "linearize"])
def test_few_batches_are_held(name, monkeypatch):
    monkeypatch.setattr(limits, "SPILL_BYTES", 1)
    _, batches, tables, options = stage_of(name, many_sessions())
    counted = [Counted(source) for source in tables]
    deque(batches(*(iter(one) for one in counted), **options), maxlen=0)
    assert all(one.sizes > 20 for one in counted)
    # what is at hand, what a frame still names, the one that tells where it ended
    assert max(one.most for one in counted) <= 5
    assert [one.alive for one in counted] == [0] * len(counted)


def test_a_table_without_rows_may_have_categories_of_polars():
    kind = pa.dictionary(pa.int8(), pa.string_view())
    none = schema.TURNS.append(pa.field("word", kind)).empty_table()
    [batch] = batches_of(none)
    assert (batch.num_rows, batch.schema) == (0, none.schema)


# --- nothing in it


def reader_of(table):
    return pa.RecordBatchReader.from_batches(table.schema, [])


def nothing():
    """Turns without rows."""
    return turns_table([]).append_column("x", pa.array([], pa.list_(pa.int64())))


@pytest.mark.parametrize("seen", [0, 1, 2])
@pytest.mark.parametrize("name", STAGES)
def test_a_stream_without_rows_gives_a_batch_without_rows(name, seen):
    """A reader knows its columns before its first batch, an iterator with it."""
    stage, batches, tables, options = stage_of(name, nothing())
    given = [
        iter([empty_batch(one.schema)] * seen) if seen else reader_of(one)
        for one in tables
    ]
    [batch] = batches(*given, **options)
    table = stage(*tables, **options)
    assert (batch.num_rows, batch.schema) == (0, table.schema)
    assert batch.schema.metadata == table.schema.metadata


def test_linearize_of_a_reader_without_rows_with_all_it_can_give():
    turns = nothing()
    options = {"payloads": ["x"]}
    [batch], [counts] = streamed(reader_of(turns), **options)
    rows, report = linearized(turns, **options)
    assert (batch.schema, counts.schema) == (rows.schema, report.schema)
    assert batch.num_rows == counts.num_rows == 0
    assert tk.simulate(reader_of(turns)) == tk.simulate(turns)


@pytest.mark.parametrize("name", STAGES)
def test_an_iterator_without_a_batch_gives_none(name):
    _, batches, tables, options = stage_of(name, nothing())
    assert list(batches(*(iter([]) for _ in tables), **options)) == []
