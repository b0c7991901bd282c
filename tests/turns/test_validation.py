from functools import partial
from itertools import combinations

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import trajkit as tk
from tests.made_tables import linearized, replaced
from trajkit import schema
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema.engine import MAX_LOGPROB
from trajkit.tables.canonical import canonical
from trajkit.turns.messages import message_key, message_record
from trajkit.turns.validation import accepted, validate

KEY = b"0123456789abcdef"
USER = {"role": "user", "content": "u"}
MESSAGE = {"key": message_key(USER), "role": "user", "body": message_record(USER)[1]}
AGAIN = {**MESSAGE, "body": None}


def versions(*ranges):
    """Weights that sampled these ranges of an output."""
    return [
        {"version": str(k), "start": start, "stop": stop}
        for k, (start, stop) in enumerate(ranges)
    ]


TURN = {
    "session_id": "a",
    "turn_index": 0,
    "prompt_ids": [1, 2],
    "output_ids": [3, 4],
    "output_logprobs": [-0.5, None],
    "messages": [MESSAGE],
    "response": None,
    "weight_versions": versions((0, 1), (1, 2)),
}
DELTA = {
    "session_id": "a",
    "turn_index": 0,
    "base_turn": None,
    "shared_length": 0,
    "suffix_ids": [1, 2],
    "output_ids": [3, 4],
    "shared_messages": 0,
    "suffix_messages": [MESSAGE],
    "response": AGAIN,
}
LATER = {
    **DELTA,
    "turn_index": 5,
    "base_turn": 0,
    "shared_length": 4,
    "suffix_ids": [],
    "shared_messages": 2,
    "suffix_messages": [],
}
LINK = {
    "session_id": "a",
    "turn_index": 0,
    "parent": None,
    "link_reason": "root",
    "order": 0,
    "rewritten_by": None,
}
CHILD = {**LINK, "turn_index": 2, "parent": 0, "link_reason": "messages", "order": 1}
DRIFT = {
    "session_id": "a",
    "turn_index": 2,
    "parent": 0,
    "lcp": 3,
    "size": 2,
    "region": "last_reply",
    "resync_path": None,
    "resync_prompt": None,
    "resync_length": None,
    "tokens_after_drift": 1,
    "cause": "tail_changed",
}
CLEAN = {"cause": "clean"}
SPAN = {
    "start": 2,
    "stop": 4,
    "turn_index": 0,
    "output_start": 0,
    "output_stop": 2,
    "kind": "trained",
}
LOST = {**SPAN, "start": 2, "stop": 2, "kind": "absorbed"}
ROW = {
    "session_id": "a",
    "row_index": 0,
    "input_ids": [1, 2, 3, 4],
    "prompt_length": 2,
    "loss_mask": [False, False, True, True],
    "logprobs": [None, None, -0.5, None],
    "spans": [LOST, SPAN],
    "parent_row": None,
    "shared_length": 0,
    "reward": 1.0,
    "row_weight": 1.0,
    "rollout_mask_sum": 2,
}
SECOND = {**ROW, "row_index": 1, "parent_row": 0, "shared_length": 4}
SESSION = {"session_id": "a", "reward": None}

NO_OUTPUT = {"output_ids": [], "output_logprobs": [], "weight_versions": []}

GOOD = [
    ("turns", [TURN]),
    ("turns", [TURN, {**TURN, "turn_index": 7}]),
    ("turns", [{**TURN, "messages": None}]),
    ("turns", [{**TURN, "messages": []}]),
    ("turns", [{**TURN, **NO_OUTPUT}]),
    ("turns", [{**TURN, "weight_versions": None}]),
    # as after updates during which nothing was sampled
    ("turns", [{**TURN, "weight_versions": versions((0, 0), (0, 2), (2, 2))}]),
    ("turns", [{**TURN, "messages": [MESSAGE, AGAIN]}]),
    # rounding may take a logprob to 1e-4, and -9999 is what an engine writes for none
    ("turns", [{**TURN, "output_logprobs": [float(MAX_LOGPROB), -9998.0]}]),
    ("turns", [DELTA, LATER]),
    ("turns", [DELTA, {**LATER, "shared_messages": None, "suffix_messages": None}]),
    ("sessions", [SESSION, {**SESSION, "session_id": "b"}]),
    ("links", [LINK, CHILD]),
    ("links", [{**LINK, "rewritten_by": 2}, CHILD]),
    # the parent comes first in the turns, so it need not in order
    ("links", [{**LINK, "order": 1}, {**CHILD, "order": 0}]),
    ("drift", [DRIFT]),
    (
        "drift",
        [{**DRIFT, "size": 0, "tokens_after_drift": 0, "region": "none"} | CLEAN],
    ),
    ("rows", [ROW, SECOND]),
    (
        "rows",
        [
            {
                **ROW,
                "prompt_length": 4,
                "loss_mask": [False] * 4,
                "logprobs": [None] * 4,
                "spans": [],
                "row_weight": None,
                "rollout_mask_sum": 0,
            }
        ],
    ),
]


def table_of(kind, rows):
    names = list(rows[0])
    plans = {"turns": schema.TURNS, "links": schema.LINKS, "drift": schema.DRIFT}
    plans |= {"rows": schema.ROWS, "sessions": schema.SESSIONS}
    plan = schema.TURNS_DELTA if "suffix_ids" in names else plans[kind]
    fields = [plan.field(name).with_nullable(True) for name in names]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


@pytest.mark.parametrize(("kind", "rows"), GOOD)
@pytest.mark.parametrize(
    "through",
    [
        lambda table: table,
        pl.DataFrame,
        lambda table: pa.Table.from_batches(table.to_batches(max_chunksize=1)),
    ],
)
def test_what_is_legal_passes(kind, rows, through):
    table = table_of(kind, rows)
    out = validate(through(table))
    assert out.schema.metadata[b"trajkit.table"] == kind.encode()
    assert out.select(table.column_names).to_pylist() == table.to_pylist()
    assert validate(out).equals(out)
    assert validate(pl.DataFrame(out), kind).equals(out)


def but(row, **changes):
    return {**row, **changes}


NAN = float("nan")


def turn(**changes):
    return [but(TURN, **changes)]


def says(**changes):
    """A turn with a message that has these fields."""
    return turn(messages=[but(MESSAGE, **changes)])


def later(**changes):
    return [DELTA, but(LATER, **changes)]


def pieces(*ranges):
    return turn(weight_versions=versions(*ranges))


def row(**changes):
    return [but(ROW, **changes)]


def span(**changes):
    return row(spans=[but(SPAN, **changes)])


LONGER = {
    "input_ids": [1, 2, 3, 4, 5],
    "loss_mask": [*ROW["loss_mask"], False],
    "logprobs": [*ROW["logprobs"], None],
}
UNKEYED = but(MESSAGE, key=None)
# what no stage takes
DOOR = [
    ([TURN, TURN], "turn 0: turn_index is repeated"),
    (turn(turn_index=4) + turn(turn_index=2), "turn 2: turn_index 2 follows 4"),
    (
        [TURN, *turn(session_id="b"), *turn(turn_index=1)],
        "'a', turn 1: the session began in table row 0 and comes back in row 2",
    ),
    # before what its turns lack
    ([TURN, *turn(session_id="b"), TURN], "'a', turn 0: the session began in table ro"),
    (turn(prompt_ids=[1, None]), r"prompt_ids\[1\] is null"),
    (turn(output_ids=[None, 2]), r"output_ids\[0\] is null"),
    (turn(output_logprobs=[0.0]), "1 output_logprobs for 2 output_ids"),
    (turn(output_logprobs=[0.0] * 3), "3 output_logprobs for 2 output_ids"),
    (turn(output_logprobs=[]), "0 output_logprobs for 2 output_ids"),
    (turn(output_mask=[True]), "turn 0: 1 elements of output_mask for 2 output"),
    (turn(output_mask=[True, None]), "turn 0: output_mask"),
    (turn(messages=[None]), r"messages\[0\] is null"),
    (turn(messages=[MESSAGE, UNKEYED]), r"messages\[1\] has no key"),
    # the delta form
    (later(base_turn=3), "base_turn 3 is not an earlier turn"),
    (later(base_turn=5), "base_turn 5 is not an earlier turn"),
    (later(base_turn=-1), "base_turn -1 is not an earlier turn"),
    (later(session_id="b"), "'b', turn 5: base_turn 0 is not an earlier turn"),
    ([but(DELTA, base_turn=5), LATER], "base_turn 5 is not an earlier turn"),
    (later(shared_length=5), "5: expected 0 to 4, tokens of the base"),
    (later(shared_length=-1), "shared_length is -1"),
    ([but(DELTA, shared_length=1)], "1: expected 0 to 0"),
    (later(suffix_ids=[1, None]), r"turn 5: suffix_ids\[1\] is null"),
    (later(suffix_messages=[UNKEYED]), r"suffix_messages\[0\] has no key"),
    (later(shared_messages=3), "3: expected 0 to 2, messages of the base"),
    (later(shared_messages=-1), "shared_messages is -1"),
    ([but(DELTA, response=None), LATER], "2: expected 0 to 1"),
    ([but(DELTA, shared_messages=1)], "1: expected 0 to 0"),
    (
        [
            but(DELTA, shared_messages=None, suffix_messages=None),
            but(LATER, shared_messages=1),
        ],
        "1: expected 0 to 0",
    ),
]
KEY_HEX = message_key(USER).hex()
BAD = {
    "turns": [
        *DOOR,
        (turn(session_id=None), "table row 0: session_id is null"),
        (turn(prompt_ids=None), "'a', turn 0: prompt_ids is null"),
        (turn(output_ids=None), "output_ids is null"),
        (turn(turn_index=-1), "turn_index is negative"),
        (turn(prompt_ids=[]), "prompt_ids is empty"),
        (turn(prompt_ids=[0, -2]), r"prompt_ids\[1\] is -2"),
        (turn(output_ids=[0, -2]), r"output_ids\[1\] is -2"),
        (turn(output_logprobs=[NAN, 0.0]), r"\[0\] is nan"),
        (turn(output_logprobs=[0.0, 1.0]), r"\[1\] is 1.0: .* at most 0"),
        (turn(output_logprobs=[0.0, -1e5]), r"is -100000.0: engines"),
        (turn(output_logprobs=[0.0, -9999.0]), r"is -9999.0: engines"),
        (
            turn(messages=[MESSAGE, but(MESSAGE, role=None)]),
            r"messages\[1\] has no role",
        ),
        (turn(response=but(MESSAGE, role=None)), "response has no role"),
        (turn(response=but(MESSAGE, key=None)), "response has no key"),
        (turn(messages=[AGAIN]), f"{KEY_HEX} has no body"),
        (
            [TURN, *turn(session_id="b", messages=[AGAIN])],
            "session 'b', turn 0: the message with the key .* has no body",
        ),
        (
            [TURN, *turn(turn_index=1, response=but(MESSAGE, body='{"role":"user"}'))],
            f"turn 1: the message with the key {KEY_HEX} has another body",
        ),
        (says(body="{"), "the message body '{' is not JSON"),
        (says(body="[" * 100_000), "the message body .* is not JSON"),
        (says(body="3"), "'3' is not a JSON object"),
        (says(role="tool"), "states another role than 'tool'"),
        (turn(weight_versions=[None]), r"weight_versions\[0\] has a null"),
        (
            turn(weight_versions=[{"version": None, "start": 0, "stop": 2}]),
            "has a null",
        ),
        (pieces((0, 1)), "end at 1 of 2"),
        (pieces((1, 2)), "1:2, expected a start of 0"),
        (pieces((0, 3)), "end at 3 of 2"),
        (pieces((0, -1)), "0:-1, expected a start of 0"),
        (pieces(), "end at 0 of 2"),
        (pieces((0, 2), (1, 2)), r"weight_versions\[1\] is 1:2, expected a start of 2"),
        ([but(DELTA, suffix_ids=[])], "prompt_ids is empty"),
        ([but(DELTA, suffix_ids=[-1])], r"suffix_ids\[0\] is -1"),
        ([but(DELTA, shared_messages=None)], "are null together"),
        ([but(DELTA, suffix_messages=[AGAIN])], "has no body"),
    ],
    "sessions": [
        ([SESSION, SESSION], "session 'a': the session has a row already"),
        ([but(SESSION, reward=NAN)], "session 'a': reward is nan: expected a finite"),
        ([but(SESSION, reward=float("inf"))], "reward is inf"),
    ],
    "links": [
        ([LINK, but(CHILD, parent=1)], "turn 2: parent 1 is not a turn"),
        ([LINK, but(CHILD, parent=2)], "parent 2 is not another turn_index"),
        ([LINK, but(CHILD, parent=-1)], "parent -1 is not another turn_index"),
        (
            [but(LINK, parent=2, order=0), but(CHILD, parent=None)],
            "order 0 does not come after its parent's, 1",
        ),
        ([but(LINK, order=None), CHILD], "its parent has no order"),
        ([LINK, but(CHILD, order=0)], "order 0 is repeated"),
        ([but(LINK, order=-1)], "order is -1"),
        ([LINK, but(CHILD, rewritten_by=0)], "rewritten_by 0 is not a later turn"),
        ([but(LINK, rewritten_by=1), CHILD], "rewritten_by 1 is not a turn"),
        ([but(LINK, link_reason="because")], "is 'because': expected one of root"),
        ([LINK, LINK], "turn_index is repeated"),
    ],
    "drift": [
        ([but(DRIFT, parent=None)], "parent is null"),
        ([but(DRIFT, parent=2)], "parent 2 is not another turn_index"),
        ([but(DRIFT, lcp=-1)], "lcp is -1"),
        (
            [but(DRIFT, tokens_after_drift=3)],
            "tokens_after_drift 3 exceeds the size 2",
        ),
        ([but(DRIFT, cause="magic")], "cause is 'magic'"),
        ([but(DRIFT, region="moon")], "region is 'moon'"),
        ([but(DRIFT, cause="clean")], "cause is 'clean' with a size of 2"),
        (
            [but(DRIFT, size=0, tokens_after_drift=0)],
            "'last_reply' with a size of 0",
        ),
        ([but(DRIFT, resync_path=3)], "resync columns are null together"),
        (
            [but(DRIFT, resync_path=3, resync_prompt=3)],
            "resync columns are null together",
        ),
    ],
    "rows": [
        ([ROW, ROW], "session 'a', row 0: row_index is repeated"),
        (row(input_ids=[1, 2, 3, -4]), r"input_ids\[3\] is -4"),
        (row(loss_mask=[False] * 3), "3 elements of loss_mask for 4"),
        (row(logprobs=[None] * 5), "5 logprobs for 4 input_ids"),
        (row(prompt_length=5), "prompt_length is 5 in a row of 4"),
        (row(prompt_length=-1), "prompt_length is -1"),
        (row(prompt_length=3), r"loss_mask\[2\] is true within the prompt"),
        (row(loss_mask=[False, False, None, True]), r"loss_mask\[2\] is null"),
        (
            row(logprobs=[-1.0, None, None, None]),
            r"logprobs\[0\] is not null, but loss_mask is false",
        ),
        (row(logprobs=[None, None, NAN, None]), r"logprobs\[2\] is nan"),
        (row(rollout_mask_sum=1), "is 1 in a row that trains 2"),
        (row(rollout_mask_sum=-1), "rollout_mask_sum is -1"),
        (row(shared_length=1), "shared_length is 1 without a parent_row"),
        ([ROW, but(SECOND, parent_row=1)], "parent_row 1 is not an earlier row_index"),
        ([ROW, but(SECOND, shared_length=5)], "shared_length is 5 in a row of 4"),
        (
            [ROW, but(SECOND, **LONGER, shared_length=5)],
            "shared_length is 5, but the parent row has 4",
        ),
        (row(reward=NAN), "reward is nan"),
        (row(row_weight=1.5), "row_weight is 1.5"),
        (row(spans=[None, *ROW["spans"]]), r"spans\[0\] has a null"),
        (span(kind=None), r"spans\[0\] has a null"),
        (span(kind="odd"), "of kind 'odd': expected one of trained"),
        (span(stop=5, output_stop=3), "2:5 .* must lie within the row"),
        (span(start=3), "must be as long as its output range"),
        (span(output_start=-1), "its output range runs backwards"),
        (
            row(spans=[but(LOST, output_start=2, output_stop=0), SPAN]),
            "its output range runs backwards",
        ),
        (span(turn_index=-1), "its turn_index is negative"),
        (span(start=1, output_stop=3), "loss_mask is true in trained spans"),
        (span(kind="duplicate"), "loss_mask is true in trained spans"),
        (span(kind="cut"), "an absorbed, cut or no_splice_point span is empty"),
        (row(spans=[SPAN, SPAN]), "not overlap the previous span"),
        (row(spans=[]), "is true for 2 tokens, but the trained spans have 0"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "rows", "match"),
    [(kind, *case) for kind, cases in BAD.items() for case in cases],
)
def test_what_breaks_a_rule_is_refused_and_rejected(kind, rows, match):
    table = table_of(kind, rows)
    for form in (table, pa.Table.from_batches(table.to_batches(max_chunksize=1))):
        with pytest.raises(InvalidTurnsError, match=match):
            validate(form, kind)
    for size in (1, 2):
        # a stream is refused where a session comes back, before it is looked at
        with pytest.raises(InvalidTurnsError, match=f"{match}|comes back"):
            list(validate.batches(table.to_reader(max_chunksize=size), kind))
    if None in table["session_id"].to_pylist():
        with pytest.raises(InvalidTurnsError, match=match):
            [*accepted(partial(validate, kind=kind), table, {})]
        return
    other = [{**row, "session_id": "good"} for row in GOOD_ROWS[kind]]
    other = [{name: row.get(name) for name in rows[0]} for row in other]
    if "suffix_ids" in rows[0]:
        other = [{**DELTA, "session_id": "good"}]
    if len(names := table["session_id"].unique()) > 1:
        return  # `accepted` takes sessions that are contiguous
    rejected = {}
    both = pa.concat_tables([table, table_of(kind, other)])
    [good] = accepted(partial(validate, kind=kind), both, rejected)
    assert good["session_id"].unique().to_pylist() == ["good"]
    assert [*rejected] == names.to_pylist()
    with pytest.raises(InvalidTurnsError, match=match):
        raise InvalidTurnsError(*rejected.values())


@pytest.mark.parametrize(("rows", "match"), DOOR)
def test_what_no_stage_takes_is_refused_by_each_in_the_same_words(rows, match):
    table = table_of("turns", rows)
    before = table_of("turns", [{**rows[0], "session_id": "0"}])
    sliced = pa.concat_tables([before, table]).combine_chunks().slice(1)
    change = tk.expand if "suffix_ids" in rows[0] else tk.compact
    for form in (
        table,
        pa.Table.from_batches(table.to_batches(max_chunksize=1)),
        sliced,
    ):
        for stage in (tk.link, tk.linearize, change):
            with pytest.raises(InvalidTurnsError, match=match):
                stage(form)


GOOD_ROWS = {
    "turns": [TURN],
    "sessions": [SESSION],
    "links": [LINK],
    "drift": [DRIFT],
    "rows": [ROW],
}

IDS = {"session_id": ["a"], "turn_index": [0], "prompt_ids": [[1]], "output_ids": [[2]]}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt_ids": None}, "no column 'prompt_ids' of turns"),
        ({"session_id": [1.5]}, "'session_id' is double"),
        ({"turn_index": ["0"]}, "'turn_index' is string"),
        ({"prompt_ids": [[1.0]]}, "element is double"),
        ({"prompt_ids": [[True]]}, "element is bool"),
        ({"prompt_ids": [3]}, "is int64: expected large_list"),
        ({"output_logprobs": [["0"]]}, "is string"),
        ({"trainable": [1]}, "'trainable' is int64"),
        ({"messages": [["u"]]}, "element is string"),
        ({"messages": [[{"role": "user"}]]}, r"has the fields \['role'\]"),
        ({"response": [{**MESSAGE, "name": "x"}]}, "has the fields"),
    ],
)
def test_columns_of_another_type_are_refused(changes, match):
    columns = {name: c for name, c in {**IDS, **changes}.items() if c is not None}
    with pytest.raises(SchemaError, match=match):
        validate(pa.table(columns), "turns")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt_ids": [[2**31]]}, "prompt_ids: .* 2147483648 not in range"),
        ({"prompt_ids": [[-(2**31) - 1]]}, "prompt_ids: .* -21474836"),
        ({"prompt_ids": [[-1, 2**31]]}, "prompt_ids: .* 2147483648 not in range"),
        (
            {"prompt_ids": pa.array([[2**31]], pa.list_(pa.uint32()))},
            "prompt_ids: .* 2147483648",
        ),
        ({"turn_index": [2**31]}, "turn_index: .* 2147483648"),
        (
            {"response": [{**MESSAGE, "key": b"short"}]},
            "'a', turn 0: response: .*fixed_size_binary",
        ),
        ({"messages": [[{**MESSAGE, "key": bytes(17)}]]}, "fixed_size_binary"),
        ({"turn_index": pa.array([None], pa.int8())}, "is null"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_rejected(changes, match):
    table = pa.table({**IDS, **changes})
    with pytest.raises(InvalidTurnsError, match=match):
        validate(table)
    with pytest.raises(InvalidTurnsError, match=match):
        canonical(table, schema.TURNS)
    rejected = {}
    assert not [*accepted(validate, table, rejected)]
    assert [*rejected] == ["a"]


def ids_with(**metadata):
    named = {f"trajkit.{name}": value for name, value in metadata.items()}
    return pa.table(IDS).replace_schema_metadata(named)


@pytest.mark.parametrize(
    ("table", "kind", "match"),
    [
        (ids_with(table="rows"), "turns", "a table of rows .*: expected turns"),
        (
            ids_with(version="1"),
            "turns",
            "version 1: this trajkit reads versions 2 to 3",
        ),
        (ids_with(version="x"), "turns", "schema version x"),
        (pa.table({"x": [1]}), None, "fit no table"),
        (pa.table({"x": [1]}), "moves", "kind='moves': expected one of"),
        ([1, 2], "turns", "list is not a table"),
        (pa.table([[1], [2]], names=["reward"] * 2), "sessions", "occurs 2 times"),
    ],
)
def test_what_is_no_such_table_is_refused(table, kind, match):
    with pytest.raises((ArgumentError, SchemaError), match=match):
        validate(table, kind)


LAYOUTS = [
    pa.list_,
    pa.large_list,
    pa.list_view,
    pa.large_list_view,
    lambda inner: pa.list_(inner, 2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inner", [pa.int32(), pa.int64(), pa.uint8(), pa.uint64()])
def test_lists_of_any_layout_are_taken(layout, inner):
    fixed = pa.types.is_fixed_size_list(layout(inner))
    prompts = [[9, 9], [1, 2], [3, 4]] if fixed else [[9], [1, 2, 3], [4]]
    # a slice behind an empty list begins at the first value all the same
    outputs = [[5, 6] if fixed else [], [5, 6], [5, 6]]
    logprobs = [[-1.0, -2.0] if fixed else [], None, [-3.0, None]]
    table = pa.table(
        {
            "session_id": ["a"] * 3,
            "turn_index": [0, 1, 2],
            "prompt_ids": pa.array(prompts, layout(inner)),
            "output_ids": pa.array(outputs, layout(inner)),
            "output_logprobs": pa.array(logprobs, layout(pa.float64())),
        }
    )
    for start, stop in combinations(range(4), 2):
        out = validate(table[start:stop])
        out.validate(full=True)
        assert out.schema.equals(schema.TURNS)
        assert out["prompt_ids"].to_pylist() == prompts[start:stop]
        assert out["output_logprobs"].to_pylist() == logprobs[start:stop]


def test_canonical_columns_are_not_copied():
    table = tk.from_records([{**IDS_RECORD, "extra": "x"}])
    out = validate(table)
    for name in table.column_names:
        before, after = table[name].chunk(0).buffers(), out[name].chunk(0).buffers()
        assert [b and b.address for b in before] == [b and b.address for b in after]


IDS_RECORD = {"session_id": "a", "prompt_ids": [1], "output_ids": [2]}


def test_absent_columns_are_null_and_further_ones_stay():
    table = pa.table({"note": ["x"], **IDS}).replace_schema_metadata({"mine": "kept"})
    out = validate(table)
    assert out.column_names == [*schema.TURNS.names, "note"]
    assert out["messages"].null_count == 1
    assert out.schema.metadata[b"mine"] == b"kept"


def test_null_logprobs_get_zero_bytes_and_nothing_else_moves():
    mask = pa.array([True, False]).buffers()[1]
    numbers = pa.py_buffer(np.array([-1.0, NAN], np.float32))
    values = pa.Array.from_buffers(pa.float32(), 2, [mask, numbers])
    lists = pa.LargeListArray.from_arrays(pa.array([0, 2]), values)
    table = pa.table({**IDS, "output_ids": [[1, 2]], "output_logprobs": lists})
    fresh = validate(table)["output_logprobs"].chunk(0)
    assert fresh.to_pylist() == [[-1.0, None]]
    data = np.frombuffer(fresh.values.buffers()[1], np.float32)
    assert data[:2].tolist() == [-1.0, 0.0]


def test_values_without_a_logprob_can_be_made_null():
    row = but(TURN, output_logprobs=[float("-inf"), -0.5])
    table = table_of("turns", [row, but(TURN, turn_index=1, output_logprobs=None)])
    out = validate(table, nonfinite_logprobs="null")
    assert out["output_logprobs"].to_pylist() == [[None, -0.5], None]


def test_a_filtered_table_passes_without_its_bodies():
    table = tk.from_records([{**IDS_RECORD, "prompt_messages": [USER]}] * 2)
    with pytest.raises(InvalidTurnsError, match="rows filtered out"):
        validate(table[1:])
    assert validate(table[1:], bodies=False).num_rows == 1


def test_a_report_that_does_not_add_up_is_refused():
    turns = tk.from_records([{**IDS_RECORD, "output_ids": [5, 6, 7]}])
    _, report = linearized(turns)
    with pytest.raises(InvalidTurnsError, match="3 tokens sampled, but 4 trained or l"):
        validate(replaced(report, "lost_cut", [1]))


def test_numbers_name_sessions_and_groups():
    """Ids are numbers in most systems; a table has them as text."""
    call = {"prompt_ids": [1], "output_ids": [2]}
    turns = tk.from_records([{**call, "session_id": k} for k in (7, 8)])
    numbers = turns.set_column(0, "session_id", pa.array([7, 8], pa.uint16()))
    assert validate(numbers).num_rows == 2
    facts = {"session_id": [8, 7], "reward": [0.5, 1.0], "group_id": [3, None]}
    rows = tk.linearize(numbers, sessions=pa.table(facts))
    assert rows["session_id"].to_pylist() == ["7", "8"]
    assert rows["reward"].to_pylist() == [1.0, 0.5]
    assert rows["group_id"].to_pylist() == [None, "3"]
