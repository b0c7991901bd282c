"""A wrong argument of any public function is an ArgumentError that names it.

A table that is none is a SchemaError, and a session that is not there has an error of its
own. Functions on files are tested with them.
"""

import inspect
import io

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.made_tables import Letters, linearized
from trajkit import analysis, learn, training, turns
from trajkit.errors import ArgumentError, SchemaError

RECORDS = [
    {
        "session_id": name,
        "prompt_ids": prompt,
        "output_ids": [3, 4],
        "output_logprobs": [-0.5, -0.25],
        "prompt_messages": [{"role": "user", "content": "u"}],
        "response_message": {"role": "assistant", "content": "a"},
        "prompt_message_index": [0] * len(prompt),
        "prompt_is_content": [True] * len(prompt),
    }
    for name in "ab"
    for prompt in ([1, 2], [1, 2, 3, 9])
]
TURNS = tk.from_records(RECORDS)
ROWS, REPORT = linearized(TURNS, reward={"a": 0.0, "b": 1.0})
LINKS = tk.link(TURNS)
DRIFT = tk.classify_drift(TURNS, LINKS)
PACKS = tk.pack(ROWS, 64)
MESSAGE = {"role": "user", "content": "u"}
STEPS = {"session_id": ["a", "b"], "turn_index": [0, 0], "reward": [0.0, 1.0]}
N_TOKENS = sum(map(len, ROWS["input_ids"].to_pylist()))
N_EDGES = sum(map(len, PACKS["edge_row"].to_pylist()))


def group(sessions):
    return sessions.set_column(
        sessions.column_names.index("group_id"),
        "group_id",
        pa.array(["g"] * len(sessions)),
    )


RIGHT = {
    tk.add_advantages: {"rows": ROWS, "sessions": training.advantages(group(REPORT))},
    tk.add_weights: {"rows": ROWS},
    tk.balance: {"packs": PACKS, "ranks": 1},
    tk.check_rows: {"rows": ROWS, "turns": TURNS},
    tk.classify_drift: {"turns": TURNS, "links": LINKS},
    tk.compact: {"turns": TURNS},
    tk.expand: {"turns": TURNS},
    tk.from_records: {"records": RECORDS},
    tk.linearize: {"turns": TURNS},
    tk.report: {"turns": TURNS},
    tk.link: {"turns": TURNS},
    tk.pack: {"rows": ROWS, "max_tokens": 64},
    tk.packs.varlen: {"pack": PACKS.to_pylist()[0]},
    tk.policy: {"name": "slime"},
    tk.simulate: {"turns": TURNS},
    tk.unpack: {"packs": PACKS, "values": np.zeros(N_EDGES), "rows": ROWS},
    tk.validate: {"table": TURNS},
    tk.verify: {"rows": ROWS, "turns": TURNS},
    tk.verify_packs: {"packs": PACKS, "rows": ROWS},
    turns.content_ids: {"kind": "image", "content_hash": "0" * 64, "n_tokens": 2},
    turns.engine_ids: {"table": TURNS},
    turns.lcp: {"a": [1], "b": [1]},
    turns.message_key: {"message": MESSAGE},
    turns.message_record: {"message": MESSAGE},
    turns.tools_key: {"tools": [{"type": "function", "function": {"name": "f"}}]},
    turns.untrain_stale: {"turns": TURNS, "max_lag": 1},
    training.advantages: {"sessions": group(REPORT)},
    training.reference_loss: {"rows": ROWS, "logprobs": np.zeros(N_TOKENS)},
    training.spread_rewards: {"rows": ROWS},
    training.step_advantages: {"rewards": pa.table(STEPS), "sessions": group(REPORT)},
    learn.observation_weights: {"rows": ROWS, "turns": TURNS},
    tk.learn.observation_report: {"rows": ROWS, "turns": TURNS},
    analysis.call_tree: {"turns": TURNS, "session_id": "a"},
    analysis.explain_drift: {"turns": TURNS, "links": LINKS, "tokenizer": Letters()},
    analysis.label_branches: {"turns": TURNS, "links": LINKS},
    analysis.metrics: {"turns": TURNS, "report": REPORT},
    analysis.output_spans: {"turns": TURNS},
    analysis.why: {"turns": TURNS},
}
ON_FILES = {"import_turns", "read_", "run", "scan_", "write_"}
TABLES = {"turns", "rows", "links", "drift", "sessions", "packs", "table", "report"}
TABLES |= {"turn_rewards", "rewards"}
# values that belong to the rows or packs, and are compared with them
DATA = {"values", "logprobs"}
LEGAL = [
    ("clip", 1.5),
    ("alpha", 1.5),
    ("epsilon", 1.5),
    ("reward", 1.5),
    ("reward", -1),
]
NAN = float("nan")
WRONG = [object(), b"x", 1.5, NAN, -1, ["zzz", 3], ("a", object()), {"zzz": object()}]
WRONG += ["zzz"]


def options():
    for function, arguments in RIGHT.items():
        for name, one in inspect.signature(function).parameters.items():
            if one.kind is not one.VAR_KEYWORD and name not in DATA:
                yield (function, arguments, name)


def is_flag(function, name):
    return isinstance(inspect.signature(function).parameters[name].default, bool)


def used(result):
    """Read a stream to its end."""
    return list(result) if hasattr(result, "__next__") else result


@pytest.mark.parametrize(("function", "arguments", "name"), [*options()])
def test_a_wrong_argument_is_named(function, arguments, name):
    used(function(**arguments))
    is_table = name in TABLES and not is_flag(function, name)
    for value in WRONG[:-1] if name in ("session_id", "kind") else WRONG:
        if (name, value) in LEGAL or (name == "message" and isinstance(value, dict)):
            continue
        if name == "records" and isinstance(value, list | tuple):
            continue  # each is checked as a record
        with pytest.raises((ArgumentError, SchemaError)) as found:
            used(function(**{**arguments, name: value}))
        if is_table:
            continue
        assert isinstance(found.value, ArgumentError), found.value
        said = str(found.value)
        assert name in said or (
            name in ("policy", "policies", "name") and "policy" in said
        )


@pytest.mark.parametrize(
    ("use", "table", "name", "values", "said"),
    [
        (turns.engine_ids, TURNS, "prompt_ids", ["x"] * 4, "'prompt_ids' is string"),
        (turns.engine_ids, TURNS, "prompt_ids", [[None]] * 4, "has a null id"),
        (turns.engine_ids, TURNS, "prompt_ids", [[2**40]] * 4, "prompt_ids: .* range"),
        (training.reference_loss, ROWS, "loss_mask", [[True]] * 4, "1 elements of"),
        (tk.write_rows, ROWS, "loss_mask", [[True]] * 4, "1 elements of loss_mask"),
        (tk.write_rows, ROWS, "loss_mask", [[None] * 4, [None] * 6] * 2, "0. is null"),
        (tk.write_rows, ROWS, "shared_length", [-1] * 4, "must not be negative"),
        (tk.write_turns, TURNS, "messages", [[None]] * 4, "messages.0. is null"),
    ],
)
def test_a_wrong_column_is_named(use, table, name, values, said):
    at = table.column_names.index(name)
    column = pa.array(values, None if use is turns.engine_ids else table[name].type)
    options = {
        tk.write_rows: {"sink": io.BytesIO(), "format": "parquet", "dedup": True},
        tk.write_turns: {"sink": io.BytesIO(), "format": "jsonl"},
        training.reference_loss: {"logprobs": np.zeros(N_TOKENS)},
    }
    with pytest.raises(tk.TrajkitError, match=said):
        use(table.set_column(at, name, column), **options.get(use, {}))


NO_PATHS = [object(), 1.5, ("a", object()), {"zzz": object()}]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("source", NO_PATHS),
        ("stage", [*NO_PATHS, "linearize"]),
        ("outputs", [*NO_PATHS, ["a.parquet"], {1: "a.parquet"}]),
        ("resume", [1.5, "", ["policy"], {"policy": object()}, {"policy": {1}}]),
        ("inputs", [3, "a.parquet", [None]]),
        ("watch", [True, "zzz", len]),
        ("rejected", NO_PATHS),
        ("format", [*WRONG]),
        ("nonfinite_logprobs", [*WRONG]),
        ("session_prefix", [*WRONG]),
    ],
)
def test_a_wrong_argument_of_run_is_named(tmp_path, name, values):
    tk.write_turns(TURNS, tmp_path / "log.parquet")
    right = {
        "source": tmp_path / "log.parquet",
        "stage": lambda turns: tk.linearize_batches(turns, "slime"),
        "outputs": tmp_path / "rows.parquet",
    }
    for value in values:
        with pytest.raises(ArgumentError, match=name):
            tk.run(**{**right, name: value})
    assert [*tmp_path.iterdir()] == [tmp_path / "log.parquet"]
    assert tk.run(**right)["rows"] == len(tk.linearize(TURNS, "slime"))


@pytest.mark.parametrize(
    ("name", "use", "values"),
    [
        ("sink", tk.write_turns, [None, 1.5, b"x", ["a"], io.StringIO()]),
        ("source", tk.read_turns, [None, 1.5, b"x", io.StringIO("{}"), []]),
        ("folder", tk.scan_turns, [1.5, b"x", "absent", ["a"]]),
        ("session_prefix", tk.scan_turns, WRONG),
        ("format", tk.write_turns, WRONG),
        ("format", tk.read_turns, WRONG),
        ("format", tk.scan_turns, WRONG),
    ],
)
def test_wrong_arguments_of_files_are_refused_at_the_call(tmp_path, name, use, values):
    path = tmp_path / "rows.parquet"
    path.touch()
    given = {"source": path}
    if use is tk.write_turns:
        given = {"turns": TURNS, "sink": path}
    for value in values:
        with pytest.raises(ArgumentError, match=name):
            use(**{**given, name: value})
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", ["x.parquet", "x.arrows", "x.jsonl.gz", "x.json", "x"])
@pytest.mark.parametrize(
    "read", [tk.read_turns, tk.scan_turns, tk.read_rows, tk.scan_rows, tk.read_sessions]
)
def test_a_missing_file_is_named_at_the_call(tmp_path, read, name):
    with pytest.raises(FileNotFoundError, match=f"No such file.*{name}'"):
        read(tmp_path / name)


def test_every_public_function_is_tried():
    known = {function.__name__ for function in RIGHT}
    for module in (tk, turns, training, analysis):
        for name in dir(module):
            function = getattr(module, name)
            if inspect.isfunction(function) and not name.startswith(tuple(ON_FILES)):
                # the batches of a stage have its options
                assert name.removesuffix("_batches") in known, name


@pytest.mark.parametrize("function", RIGHT)
def test_rows_come_before_turns(function):
    names = list(inspect.signature(function).parameters)
    if {"rows", "turns"} <= set(names):
        assert names[:2] == ["rows", "turns"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reward": 1.0, "sessions": REPORT}, "reward=1.0, and sessions is given"),
        ({"reward": REPORT, "sessions": REPORT}, "reward is a table, and sessions"),
        ({"reward": {"a": float("inf"), "b": None}}, "session 'a': reward=inf"),
        ({"reward": {1: 1.0}}, "reward has the key 1"),
        ({"reward": {"a": True, "b": None}}, "session 'a': reward is of type bool"),
        ({"reward": 10**400}, "reward=inf: expected a finite"),
        ({"max_row_tokens": 2**63}, "max_row_tokens=92233720"),
        ({"payloads": ["input_ids"]}, "'input_ids' is the name of"),
        ({"payloads": ["x", "x"]}, "'x' is named twice"),
    ],
)
def test_arguments_that_exclude_each_other(arguments, said):
    with pytest.raises(ArgumentError, match=said):
        tk.linearize(TURNS, **arguments)
