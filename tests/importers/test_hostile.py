"""Files with wrong types, nulls and numbers beyond any range, of every format."""

import contextlib
import json
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests.importers.test_importers import TEXT, WRITERS, Letters, places, put
from trajkit.errors import FormatError
from trajkit.importers import FORMATS

ODD = (
    *(None, True, -1, 2**31, 2**64, -(10**30), 1e308, float("nan"), "", "x", "\ud800"),
    *([], [None], [[1]], {}, {"a": None}, [{}], [1, "x"], [-5], "[1", "{"),
)
# files of JSON, or with JSON in a zip file
JSON = [name for name in FORMATS if name != "slime"]


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
    kinds = (".json", ".jsonl", ".traj", ".eval")
    path = min(one for one in folder.rglob("*") if one.suffix in kinds)
    if name == "inspect":
        with zipfile.ZipFile(path) as archive:
            (inner,) = [one for one in archive.namelist() if one.startswith("samples/")]
            value = json.loads(archive.read(inner))
    else:
        text = path.read_text()
        value = json.loads(text.splitlines()[-1] if path.suffix == ".jsonl" else text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(sorted(places(value), key=str)))
        value = put(value, at, data.draw(st.sampled_from(ODD)))
    if name == "inspect":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(inner, json.dumps(value))
            archive.writestr("header.json", "{}")
    else:
        path.write_text(json.dumps(value) + "\n")
    survives(path, name)


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
