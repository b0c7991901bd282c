"""First prompts that sessions share: the same turns, in fewer bytes."""

import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.strategies import runs
from trajkit import shared_prompts
from trajkit.errors import InvalidTurnsError, TrajkitError
from trajkit.validate import set_aside

FORMATS = ["parquet", "arrow", "arrows"]


def group(n_sessions, prompt, n_turns=2):
    """Rollouts of one task."""
    for k in range(n_sessions):
        held = list(prompt)
        for turn in range(n_turns):
            output = [k, turn, 5]
            yield {
                "session_id": f"{len(prompt)}-{k}",
                "prompt_ids": held,
                "output_ids": output,
            }
            held = [*held, *output, 7]


@given(records=runs(), data=st.data())
def test_whatever_is_shared_comes_back(records, data):
    turns = tk.from_records(records)
    delta = tk.compact(turns)
    shared = tk.compact(data.draw(st.sampled_from([turns, delta])), share_prompts=True)
    assert shared_prompts.unshare(shared).equals(delta)
    assert tk.expand(shared).equals(turns)
    assert tk.compact(shared).equals(delta)
    assert tk.linearize(shared).equals(tk.linearize(turns))
    assert tk.link(shared).equals(tk.link(turns))
    assert set_aside(shared, bodies=False)[0].equals(set_aside(delta, bodies=False)[0])
    for format in FORMATS:
        file = io.BytesIO()
        tk.write_turns(shared, file, format=format)
        assert tk.read_turns(io.BytesIO(file.getvalue())).equals(delta)


def test_a_prompt_of_several_sessions_is_held_once():
    prompt = list(range(500))
    turns = tk.from_records([*group(4, prompt), *group(1, [1, 2, 3])])
    shared = tk.compact(turns, share_prompts=True)
    column = shared["shared_prompt"].combine_chunks()
    assert [len(text.as_py()) for text in column.dictionary] == [4 * 500]
    assert column.indices.to_pylist() == [0, None] * 4 + [None] * 2
    sizes = [len(ids) for ids in shared["suffix_ids"].to_pylist()]
    assert sizes == [0, 1] * 4 + [3, 1]


def test_streams_and_files_share(tmp_path):
    turns = tk.from_records([*group(4, range(500)), *group(3, range(40))])
    delta = tk.compact(turns)
    batches = tk.compact(iter(turns.to_batches()), share_prompts=True)
    whole = pa.Table.from_batches(batches)
    assert shared_prompts.unshare(whole).equals(delta)
    paths = [tmp_path / f"{name}.parquet" for name in ("full", "delta", "shared")]
    tk.write_turns(turns, paths[0])
    tk.compact_file(paths[0], paths[1])
    tk.compact_file(paths[0], paths[2], share_prompts=True)
    assert tk.read_turns(paths[2]).equals(delta)
    streamed = pa.Table.from_batches(tk.stream_turns(paths[2]))
    assert streamed.equals(delta)
    assert pa.Table.from_batches(tk.iter_turns(paths[2])).equals(delta)
    again = tmp_path / "again.parquet"
    tk.expand_file(paths[2], again)
    assert tk.read_turns(again).equals(turns)


@pytest.mark.parametrize(("row", "text"), [(0, b"abc"), (1, b"abcd")])
def test_what_is_no_shared_prompt_is_refused(row, text):
    delta = tk.compact(tk.from_records(group(1, [1, 2, 3])))
    texts = [text if k == row else None for k in range(2)]
    bad = delta.append_column("shared_prompt", pa.array(texts, pa.large_binary()))
    with pytest.raises(InvalidTurnsError, match="shared_prompt of"):
        tk.linearize(bad)


def test_a_column_of_that_name_in_full_turns_is_further_data():
    turns = tk.from_records(group(1, [1, 2, 3]))
    more = turns.append_column("shared_prompt", pa.array(["x", "y"]))
    assert tk.linearize(more).equals(tk.linearize(turns))
    assert shared_prompts.unshare(more).equals(more)


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("suffix_ids", pa.array([[1, None]] * 2), "suffix_ids holds a null"),
        ("suffix_ids", pa.array([None, [1]]), "suffix_ids is null"),
        ("suffix_ids", pa.array([[2**40]] * 2), "1099511627776 is out of range"),
        ("suffix_ids", pa.array(["a", "b"]), "'suffix_ids' is string: expected"),
        (shared_prompts.NAME, pa.array([1, 2]), "'shared_prompt' is int64: expected"),
    ],
)
def test_odd_ids_are_refused_as_where_nothing_is_shared(column, values, text):
    records = [
        {"session_id": name, "prompt_ids": [1], "output_ids": [2]} for name in "ab"
    ]
    delta = tk.compact(tk.from_records(records), share_prompts=True)
    odd = delta.set_column(delta.column_names.index(column), column, values)
    for read in (tk.expand, tk.linearize):
        with pytest.raises(TrajkitError, match=text):
            read(odd)


def test_sessions_cut_out_of_a_table_share_what_they_have():
    """Where the ids of the first of them are not those of the buffer."""
    turns = tk.compact(tk.from_records([*group(2, [1, 2]), *group(3, range(40))]))
    for start in (2, 4):
        some = turns.slice(start)
        shared = tk.compact(some, share_prompts=True)
        assert shared[shared_prompts.NAME].null_count < len(some)
        assert shared_prompts.unshare(shared).equals(some)


def test_nothing_is_no_prompt_to_share():
    calls = [{"session_id": name, "prompt_ids": [], "output_ids": [1]} for name in "ab"]
    shared = tk.compact(tk.from_records(calls), share_prompts=True)
    assert shared[shared_prompts.NAME].null_count == 2
