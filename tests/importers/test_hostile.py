"""Files with wrong types, nulls and numbers beyond any range, of every format."""

import contextlib
import json
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests.importers.test_importers import TEXT, WRITERS, Letters
from trajkit.errors import FormatError
from trajkit.importers import FORMATS

ODD = (
    *(None, True, -1, 2**31, 2**64, -(10**30), 1e308, float("nan"), "", "x", "\ud800"),
    *([], [None], [[1]], {}, {"a": None}, [{}], [1, "x"], [-5], "[1", "{"),
)
JSON = [name for name in FORMATS if name not in ("slime", "rllm", "inspect")]


def places(value, path=()):
    """Every place in a value."""
    yield path
    if isinstance(value, dict):
        for key, within in value.items():
            yield from places(within, (*path, key))
    elif isinstance(value, list):
        for k, within in enumerate(value):
            yield from places(within, (*path, k))


def put(value, path, odd):
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], odd)
    return copy


def survives(path, name):
    tokenizer = Letters() if name in TEXT else None
    with contextlib.suppress(FormatError):
        turns, report = tk.import_turns(path, name, tokenizer=tokenizer)
        assert all(report["place"].to_pylist())
        for turn in turns.to_pylist():
            assert all(0 <= token < 2**31 for token in turn["prompt_ids"])


@pytest.mark.parametrize("name", JSON)
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_one_odd_value_never_ends_an_import(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("hostile")
    WRITERS[name](folder)
    path = min(
        one for one in folder.rglob("*") if one.suffix in (".json", ".jsonl", ".traj")
    )
    text = path.read_text()
    lines = [json.loads(text)] if path.suffix != ".jsonl" else []
    lines = lines or [json.loads(line) for line in text.splitlines()]
    value = lines[-1]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(sorted(places(value), key=str)))
        value = put(value, at, data.draw(st.sampled_from(ODD)))
    path.write_text(json.dumps(value) + "\n")
    survives(path, name)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_odd_values_in_a_sample_of_inspect(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("hostile")
    WRITERS["inspect"](folder)
    path = folder / "log.eval"
    with zipfile.ZipFile(path) as archive:
        (name,) = [one for one in archive.namelist() if one.startswith("samples/")]
        value = json.loads(archive.read(name))
    at = data.draw(st.sampled_from(sorted(places(value), key=str)))
    value = put(value, at, data.draw(st.sampled_from(ODD)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, json.dumps(value))
        archive.writestr("header.json", "{}")
    survives(path, "inspect")


def test_deep_nesting_never_ends_an_import(tmp_path):
    deep = "[" * 50_000 + "]" * 50_000
    trace = '{"attributes": ' + deep + ', "traceId": "t", "spanId": "s"}'
    for name, text in (
        ("otel", trace),
        ("openai", '{"session_id": "s", "request": {}, "response": ' + deep + "}"),
        ("records", '{"prompt_ids": [1], "output_ids": [2], "metadata": ' + deep + "}"),
        ("records", '{"prompt_ids": [1], "output_ids": [2], "messages": ' + deep + "}"),
    ):
        (tmp_path / "x.jsonl").write_text(text + "\n")
        survives(tmp_path / "x.jsonl", name)
