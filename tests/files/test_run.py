"""Stages from file to file: in pieces, gathered, in parts, with sessions rejected."""

import gzip
import json
import os
import random
import re
from contextlib import ExitStack
from functools import partial
from itertools import chain, combinations, pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.cli.test_cli import run_json
from tests.engines.runs import session
from tests.file_stages import linearize_file
from tests.made_tables import call
from trajkit import cli
from trajkit.errors import (
    ArgumentError,
    FormatError,
    InvalidTurnsError,
    SchemaError,
)
from trajkit.files import run as run_module
from trajkit.files import tables
from trajkit.files.formats import paths_in
from trajkit.files.run import Watch
from trajkit.files.tables import index_sessions, read_any_rows, write_rows, write_table
from trajkit.schema import REPORT, TURNS
from trajkit.tables import limits, stages
from trajkit.tables.threads import prefetch

SUFFIXES = ["parquet", "arrow", "arrows", "jsonl", "jsonl.gz"]


def some_sessions(n=12):
    return list(chain(*(session(f"s{k}", 1 + k % 5) for k in range(n))))


@pytest.fixture
def small(monkeypatch):
    """Pieces, parts, buckets and batches of a few turns each."""
    monkeypatch.setattr(limits, "READ_TOKENS", 600)
    monkeypatch.setattr(limits, "FILE_TURNS", 5)
    monkeypatch.setattr(limits, "BUCKET_BYTES", 400)
    monkeypatch.setattr(limits, "SPILL_BYTES", 200)
    monkeypatch.setattr(limits, "MIN_READ_ROWS", 2)
    monkeypatch.setattr(limits, "READ_BYTES", 1)
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 1000)


def scattered(records):
    """The same calls, sessions mixed."""
    numbered = list(records)
    random.Random(0).shuffle(numbered)
    return numbered


def write_log(records, path):
    """Calls as a log holds them, one after another as they came."""
    if ".jsonl" in path.name:
        text = "".join(f"{json.dumps(record)}\n" for record in records).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return
    tk.write_turns(
        (tk.from_records([record]).to_batches()[0] for record in records), path
    )


@pytest.mark.parametrize("suffix_", SUFFIXES)
def test_scattered_sessions_are_gathered(tmp_path, request, suffix_):
    log = tmp_path / f"log.{suffix_}"
    write_log(scattered(some_sessions()), log)
    for n_groups in (1, 3):  # read back in one, or in several
        index = index_sessions(paths_in(log), None)
        assert index.scattered is not None
        assert min(len({*index.groups().values()}), 3) == n_groups
        got = pa.Table.from_batches(tk.scan_turns(log, folder=tmp_path))
        assert got.equals(tk.read_turns(log))
        assert os.listdir(tmp_path) == [log.name]
        request.getfixturevalue("small")


@pytest.mark.parametrize("suffix_", [".parquet", ".arrow", ".arrows", ".jsonl"])
def test_turns_out_of_order_are_found_across_batches_and_files(tmp_path, suffix_):
    turns = tk.from_records(some_sessions(2)[1:])
    assert turns["turn_index"].to_pylist() == [0, 1]
    one, two = (tmp_path / f"{name}{suffix_}" for name in "ab")
    tk.write_turns(turns.slice(1, 1), one)
    tk.write_turns(turns.slice(0, 1), two)
    assert index_sessions([two, one], None).scattered is None
    assert index_sessions([one, two], None).scattered == "s1"
    batches = (turns.slice(k, 1).to_batches()[0] for k in (1, 0))
    tk.write_turns(batches, one)
    assert index_sessions([one], None).scattered == "s1"


def test_threads_write_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MIN_PART_TOKENS", 64)
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 1000)
    log = tmp_path / "log.parquet"
    write_log(some_sessions(), log)
    for threads in (1, 2, 3):
        linearize_file(log, tmp_path / f"{threads}.parquet", threads=threads)
    first, *others = ((tmp_path / f"{n}.parquet").read_bytes() for n in (1, 2, 3))
    assert all(other == first for other in others)


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Killed(Exception):
    pass


def killed_after(n_turns):
    """A function for `Watch.advances` that raises once so many turns have passed."""
    gone = 0

    def advances(n):
        nonlocal gone
        gone += n
        if gone >= n_turns:
            raise Killed

    return advances


@pytest.mark.parametrize(
    ("names", "mixed"),
    [
        (["log.parquet"], True),
        (["log.jsonl.gz"], False),
        (["0.arrows", "1.arrow", "2.parquet", "3.jsonl", "4.jsonl.gz"], False),
    ],
)
def test_a_run_that_was_stopped_goes_on(tmp_path, small, names, mixed):
    log = tmp_path / "log"
    log.mkdir()
    records = some_sessions(15)
    n_turns = len(records)
    # files end within sessions
    cuts = [n_turns * k // len(names) for k in range(len(names) + 1)]
    for name, (start, stop) in zip(names, pairwise(cuts), strict=True):
        some = records[start:stop]
        write_log(scattered(some) if mixed else some, log / name)

    def go(name, most):
        folder = tmp_path / name
        begun = []
        watch = Watch(lambda index, done: begun.append(done), killed_after(most))
        try:
            totals = linearize_file(
                log, f"{folder}/rows/", report=f"{folder}/report/", watch=watch
            )
        except Killed:
            return None, begun[0]
        return totals, begun[0]

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, _ = go("whole", n_turns + 1)
    assert len(list((tmp_path / "whole/rows").glob("part-*.parquet"))) > 3
    expected = tk.linearize(tk.read_turns(log))
    assert tk.read_rows(tmp_path / "whole/rows").equals(expected)
    starts = []
    for most in (8, 9, 20, n_turns + 1):
        totals, begun = go("parts", most)
        starts.append(begun)
    assert totals == whole
    assert starts == sorted(starts)
    assert starts[-1] > 8
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    assert go("parts", 1) == (whole, n_turns)


def test_rows_in_the_directory_of_the_turns_are_skipped(tmp_path):
    sessions = some_sessions()
    write_log(sessions, tmp_path / "turns.parquet")
    turns = tk.read_turns(tmp_path / "turns.parquet")
    rows = tk.linearize(turns)
    tk.write_rows(rows, tmp_path / "rows.arrow")
    tk.write_rows(rows, tmp_path / "a-rows.parquet")
    assert tk.read_turns(tmp_path) == turns
    # the parts are written into the directory that is read, and the run can be resumed
    for _ in range(2):
        linearize_file(tmp_path, f"{tmp_path}/rows/", report=tmp_path / "report")
    assert tk.read_rows(tmp_path / "rows") == rows
    (tmp_path / "turns.parquet").unlink()
    said = r"has no file of turns, only rows \(a-rows.parquet\), report"
    with pytest.raises(FormatError, match=said):
        tk.read_turns(tmp_path)


def test_a_directory_of_another_job_is_refused(tmp_path, small):
    log = tmp_path / "log.parquet"
    write_log(some_sessions(), log)
    folder = tmp_path / "rows"
    folder.mkdir()
    linearize_file(log, folder)
    for choice in (
        *({"policy": "slime"}, {"max_row_tokens": 9}, {"reward": {"s1": 1.0}}),
        *({"dedup": True}, {"nonfinite_logprobs": "null"}),
    ):
        with pytest.raises(FormatError, match="parts of another job"):
            linearize_file(log, folder, **choice)
    known = log.stat()
    os.utime(log, ns=(known.st_atime_ns, known.st_mtime_ns + 1))
    with pytest.raises(FormatError, match="parts of another job"):
        linearize_file(log, folder)
    os.utime(log, ns=(known.st_atime_ns, known.st_mtime_ns))
    linearize_file(log, folder)
    (folder / "part-00001.parquet").unlink()
    with pytest.raises(FormatError, match=r"part-00001.parquet is missing, which"):
        linearize_file(log, folder)
    (folder / "_manifest.json").write_text("{}")
    with pytest.raises(FormatError, match="is not a manifest"):
        linearize_file(log, folder)
    (folder / "_manifest.json").unlink()
    with pytest.raises(FormatError, match="contains files"):
        linearize_file(log, folder)
    with pytest.raises(ArgumentError, match="give a directory"):
        linearize_file(log, f"{tmp_path}/fresh/", report=tmp_path / "report.parquet")


def is_bad(turn):
    return turn["session_id"] in ("s3", "s9")


@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "scattered"])
@pytest.mark.parametrize("suffix_", ["parquet", "jsonl"])
def test_bad_sessions_are_rejected(tmp_path, small, suffix_, mixed):
    log, rows, aside = (
        tmp_path / n for n in (f"log.{suffix_}", "r.parquet", "a.parquet")
    )
    order = scattered if mixed else list
    records = order(some_sessions())
    if suffix_ == "jsonl":
        odd = {"prompt_ids": [3, -4]}
        write_log([one | odd if is_bad(one) else one for one in records], log)
    else:
        lines = tk.from_records(records).to_pylist()
        for line in filter(is_bad, lines):
            line["output_logprobs"] = [-0.5]
        pq.write_table(pa.Table.from_pylist(order(lines), TURNS), log)
    with pytest.raises(InvalidTurnsError, match=r"session 's[39]'"):
        linearize_file(log, rows)
    assert not rows.exists()
    totals = linearize_file(log, rows, rejected=aside)
    assert totals["rejected"] == 2
    good = tk.from_records(one for one in some_sessions() if not is_bad(one))
    got, due = tk.read_rows(rows), tk.linearize(good)
    keys = [("session_id", "ascending"), ("row_index", "ascending")]
    assert got.sort_by(keys).to_pylist() == due.sort_by(keys).to_pylist()
    bad = pq.read_table(aside).to_pylist()
    assert sorted(line["session_id"] for line in bad) == ["s3", "s9"]
    said = "is -4" if suffix_ == "jsonl" else "1 output_logprobs for"
    for line in bad:
        assert line["reason"].startswith(f"session {line['session_id']!r}, turn")
        assert said in line["reason"]


@pytest.mark.parametrize("refused", [["s2"], ["s0", "s1", "s2", "s3", "s4"]])
def test_what_a_stage_refuses_is_rejected(tmp_path, small, refused):
    log, rows, report, aside = (
        tmp_path / f"{n}.parquet" for n in ("log", "rows", "report", "aside")
    )
    write_log(without_logprobs(some_sessions(5), refused), log)
    policy = tk.policy("faithful", missing_logprobs="raise")
    with pytest.raises(InvalidTurnsError, match=f"session '{refused[0]}'"):
        linearize_file(log, rows, policy)
    totals = linearize_file(log, rows, policy, report=report, rejected=aside)
    assert (totals["rejected"], totals["sessions"]) == (len(refused), 5 - len(refused))
    for name, line in zip(refused, pq.read_table(aside).to_pylist(), strict=True):
        assert f"session '{name}'" in line["reason"]
    # outputs are there where every session is rejected
    assert not {*tk.read_rows(rows)["session_id"].to_pylist()} & {*refused}
    assert pq.read_table(report).schema.names == REPORT.names


def without_logprobs(records, names):
    return [
        one | {"output_logprobs": None} if one["session_id"] in names else one
        for one in records
    ]


def test_a_piece_ends_with_the_session_that_fills_it_however_the_turns_come():
    """Sessions of 1 to 5 turns make pieces of 6 turns and more."""
    turns = tk.from_records(some_sessions())
    sizes = [6, 9, 6, 9, 3]
    names = turns["session_id"].to_pylist()
    starts = [k for k in range(1, len(names)) if names[k] != names[k - 1]]
    for one, two in combinations(starts, 2):
        tables = [turns.slice(0, one), turns.slice(one, two - one), turns.slice(two)]
        with (
            mock.patch.object(limits, "READ_TOKENS", 6),
            mock.patch.object(
                stages, "cost", lambda table: np.ones(len(table), np.int64)
            ),
        ):
            made = list(stages.rechunk(tables))
        assert [len(piece) for piece in made] == sizes, (one, two)


@pytest.mark.parametrize("n_ahead", [1, 4])
def test_what_is_read_ahead_ends_with_its_user(n_ahead):
    closed = []

    def numbers():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    with ExitStack() as stack:
        ahead = prefetch(numbers(), stack, n_ahead)
        assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    assert closed == [True]

    def broken():
        yield 1
        raise Killed

    with ExitStack() as stack:
        ahead = prefetch(broken(), stack, n_ahead)
        assert next(ahead) == 1
        with pytest.raises(Killed):
            next(ahead)


# Data as others have it


@pytest.fixture
def parts(tmp_path):
    """The command for a log of one call, with its outputs in parts."""
    write_log([call("a", [1], [2])], tmp_path / "t.jsonl")
    places = {"report": tmp_path / "report"}
    return partial(linearize_file, tmp_path / "t.jsonl", f"{tmp_path}/rows/", **places)


def test_a_report_overwrites_no_file_of_another(tmp_path, parts):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "part-00000.parquet").write_text("mine")
    with pytest.raises(FormatError, match="report contains files, but no"):
        parts()
    assert (tmp_path / "report" / "part-00000.parquet").read_text() == "mine"


def test_a_part_that_was_not_yet_remembered_is_made_again(tmp_path, parts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run_module.Manifest, "add", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            parts()
    assert (tmp_path / "rows" / "part-00000.parquet").exists()
    parts()
    assert tk.read_rows(tmp_path / "rows").num_rows == 1


def test_what_ended_before_its_first_part_leaves_room_for_another_job(tmp_path, parts):
    with pytest.raises(InvalidTurnsError, match="no line in sessions"):
        parts(reward={"b": 1.0})
    parts(reward={"a": 1.0})
    assert tk.read_rows(tmp_path / "rows")["reward"].to_pylist() == [1.0]


def test_full_turns_beside_delta_turns_are_refused(tmp_path):
    turns = tk.from_records([call("a", [1], [2]), call("b", [1], [2])])
    tk.write_turns(turns.slice(0, 1), tmp_path / "a.parquet")
    tk.write_turns(tk.compact(turns.slice(1)), tmp_path / "b.parquet")
    for read in (tk.read_turns, lambda path: list(tk.scan_turns(path))):
        with pytest.raises(SchemaError, match="some of the turns are in full"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        ([b"\xff", b"a"], SchemaError, "'session_id' is binary: expected string"),
        ([["a"], ["b"]], SchemaError, "'session_id' is list<.*>: expected string"),
        (["a", None], InvalidTurnsError, "session_id is null"),
    ],
)
def test_sessions_without_a_name_are_refused(tmp_path, small, names, error, text):
    turns = tk.from_records([call("a", [1], [2]), call("a", [1], [3])])
    odd = turns.set_column(0, "session_id", pa.array([*names, names[0]][:2]))
    odd = pa.concat_tables([odd, odd])
    pq.write_table(odd, tmp_path / "t.parquet")
    with pytest.raises(error, match=text):
        list(tk.scan_turns(tmp_path / "t.parquet"))
    with pytest.raises(error, match=text):
        list(tk.linearize_batches(iter(odd.to_batches())))


def test_lists_in_a_dictionary_are_lists():
    turns = tk.from_records([call("a", [1], [2]), call("b", [1], [2])])
    prompts = pa.DictionaryArray.from_arrays(
        pa.array([0, 0], pa.int32()), pa.array([[1]], pa.list_(pa.int64()))
    )
    coded = turns.set_column(2, "prompt_ids", prompts)
    expected = tk.linearize(turns)
    assert tk.linearize(coded) == expected
    streamed = tk.linearize_batches(iter(coded.to_batches()))
    assert pa.Table.from_batches(streamed) == expected


# --- verify


def broken_rows(table):
    """The rows with a fault in some sessions, and one session without rows."""
    rows = table.to_pylist()
    rows = [row for row in rows if row["session_id"] != "s4"]
    for row in rows:
        if row["session_id"] in ("s1", "s7", "s10"):
            row["loss_mask"][0] = not row["loss_mask"][0]
            row["row_weight"] = 0.5
    return pa.Table.from_pylist(rows, table.schema)


def as_text(violations):
    """Violations in an order that does not tell where they were found."""
    return sorted(map(json.dumps, violations))


@pytest.mark.parametrize(
    ("kind", "suffix_", "turns_order", "order"),
    [
        ("own", "parquet", list, "as written"),
        ("own", "jsonl.gz", scattered, "rows mixed"),
        ("stored", "arrows", list, "as written"),
        ("stored", "arrows", scattered, "sessions mixed"),
        ("foreign", "arrow", scattered, "rows mixed"),
        ("without numbers", "parquet", scattered, "sessions mixed"),
        ("without numbers", "jsonl", scattered, "rows mixed"),
    ],
)
def test_files_break_what_their_tables_break(
    tmp_path, small, kind, suffix_, turns_order, order
):
    log, path = tmp_path / "log.parquet", tmp_path / f"rows.{suffix_}"
    write_log(turns_order(some_sessions()), log)
    rows = broken_rows(tk.linearize(tk.read_turns(log), "strict"))
    place = list(range(len(rows)))
    if order == "sessions mixed":
        names = rows["session_id"].to_pylist()
        place.sort(key=lambda k: (names[k][::-1], k))
    elif order == "rows mixed":
        random.Random(2).shuffle(place)
    rows = rows.take(place)
    if kind in ("own", "stored"):
        write_rows(rows, path, dedup=kind == "stored")
    else:
        names = ["session_id", "input_ids", "loss_mask", "logprobs"]
        write_table(rows.select(names + ["row_index"] * (kind == "foreign")), path)
    whole = tk.verify(read_any_rows(path), tk.read_turns(log), "strict").to_pylist()
    output = tmp_path / "found.parquet"
    argv = ["verify", str(path), str(log), "--policy", "strict", "-o", str(output)]
    assert cli.main(argv) == cli.BAD_DATA
    found = pq.read_table(output).to_pylist()
    assert as_text(found) == as_text(whole)
    assert {line["session_id"] for line in found} >= {"s4"}
    assert sorted(os.listdir(tmp_path)) == sorted([log.name, path.name, output.name])


def test_rows_of_no_session_are_verified_whole(tmp_path, small, capsys):
    log, path = tmp_path / "log.parquet", tmp_path / "rows.parquet"
    write_log(scattered(some_sessions(3)), log)
    rows = tk.linearize(tk.read_turns(log), "strict")
    write_table(rows.select(["input_ids", "loss_mask", "logprobs"]), path)
    argv = ["verify", str(path), str(log)]
    assert cli.main(argv) == cli.DONE
    assert capsys.readouterr().out.startswith("no violations\nwithout --policy, ")
    argv += ["--policy", "strict"]
    assert cli.main(argv) == cli.DONE
    assert capsys.readouterr().out == "no violations\n"
    write_table(rows.slice(1).select(["input_ids", "loss_mask"]), path)
    whole = tk.verify(read_any_rows(path), tk.read_turns(log), "strict").to_pylist()
    found = run_json(capsys, *argv, code=cli.BAD_DATA)["violations"]
    assert found == whole
    names = pa.array([None, *rows["session_id"].to_pylist()[1:]])
    write_table(
        rows.select(["input_ids", "loss_mask"]).append_column("session_id", names), path
    )
    assert cli.main(argv) == cli.BAD_DATA
    assert "session_id is null in some rows" in capsys.readouterr().err


@pytest.mark.parametrize("last", ["s11", "s3"])
def test_rows_of_sessions_that_are_left_out_are_passed_over(
    tmp_path, small, capsys, last
):
    log, path = (tmp_path / f"{n}.parquet" for n in ("log", "rows"))
    turns = tk.from_records(some_sessions())
    rows = broken_rows(tk.linearize(turns))
    order = sorted(
        range(len(rows)), key=lambda k: rows["session_id"][k].as_py() == last
    )
    write_rows(rows.take(order), path)
    lines = turns.to_pylist()
    for line in lines:
        if line["session_id"] in ("s3", "s7"):
            line["output_logprobs"] = [-0.5]
    pq.write_table(pa.Table.from_pylist(lines, TURNS), log)
    argv = ["verify", str(path), str(log), "--policy", "faithful", "--json"]
    assert cli.main(argv) == cli.BAD_DATA
    out, err = capsys.readouterr()
    found = json.loads(out)["violations"]
    assert {one["session_id"] for one in found} == {"s1", "s4", "s10"}
    for name in ("s3", "s7"):
        assert f"session {name!r} is left out: {log}: session {name!r}, turn" in err


# --- commands that add up


def test_a_session_that_one_policy_refuses_is_counted_by_none(tmp_path, small, capsys):
    """Others of its piece are counted once, though the piece is looked at again."""
    log, aside = (str(tmp_path / f"{name}.parquet") for name in ("log", "aside"))
    records = without_logprobs(some_sessions(5), ["s2"])
    write_log(records, Path(log))
    argv = ["simulate", log, "--policy", "faithful", "--policy", "strict"]
    argv += ["--set", "missing_logprobs=raise"]
    assert cli.main(argv) == cli.BAD_DATA
    assert "session 's2'" in capsys.readouterr().err
    said = run_json(capsys, *argv, "--rejected", aside)
    assert said["rejected"] == 1
    good = tk.from_records([one for one in records if one["session_id"] != "s2"])
    policies = ["faithful", tk.policy("strict", missing_logprobs="raise")]
    assert said["policies"] == tk.simulate(good, policies).to_pylist()


# --- outputs stand together


@pytest.mark.parametrize("full", ["rows", "report", "rejected"])
@pytest.mark.parametrize("parts", [False, True], ids=["files", "parts"])
def test_outputs_stand_all_or_none(tmp_path, small, monkeypatch, parts, full):
    """A disk that is full when one file is closed leaves no other file behind."""
    write_log(some_sessions(), tmp_path / "log.parquet")
    suffix_ = "/" if parts else ".parquet"
    names = ["rows", "report", "rejected"]
    places = {name: f"{tmp_path}/{name}{suffix_}" for name in names}
    n_written = 0

    def write(batches, path, dedup):
        nonlocal n_written
        write_table(batches, path)
        n_written += path.parent.name == full or path.name.endswith(f"{full}.parquet")
        if n_written == 1 + parts:  # of parts, the second
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tables, "write_any", write)
    if not parts:
        Path(places["report"]).write_text("of the run before")
    options = {name: places[name] for name in names[1:]}
    with pytest.raises(OSError, match="No space left") as refused:
        linearize_file(tmp_path / "log.parquet", places["rows"], **options)
    place = Path(places[full])
    named = place / "part-00001.parquet" if parts else place
    assert refused.value.filename == str(named)
    if parts:
        for name in names:
            whole = [one.name for one in Path(places[name]).glob("[!_]*")]
            assert whole == ["part-00000.parquet"]
    else:
        assert sorted(os.listdir(tmp_path)) == ["log.parquet", "report.parquet"]
        assert Path(places["report"]).read_text() == "of the run before"


def test_a_report_that_cannot_stand_leaves_no_rows(tmp_path, capsys):
    write_log(some_sessions(2), tmp_path / "log.parquet")
    (tmp_path / "report").mkdir()
    argv = ["linearize", f"{tmp_path}/log.parquet", "-o", f"{tmp_path}/rows.parquet"]
    assert cli.main([*argv, "--report", f"{tmp_path}/report"]) == cli.BAD_FILE
    assert capsys.readouterr().err == f"trajkit: {tmp_path}/report: Is a directory\n"
    assert sorted(os.listdir(tmp_path)) == ["log.parquet", "report"]


def test_a_directory_of_several_formats_has_one_order(tmp_path, small):
    """Lines count their turns together, so they come behind what is numbered."""
    prompts = ([1], [1, 2, 4])
    records = [call(name, ids, [2]) for name in "ab" for ids in prompts]
    write_log(records[:1], tmp_path / "a.jsonl")
    write_log(list(session("p", 2)), tmp_path / "b.parquet")
    write_log(records[1:], tmp_path / "c.jsonl")
    whole = tk.read_turns(tmp_path)
    assert whole["session_id"].to_pylist() == ["p", "p", "a", "a", "b", "b"]
    assert whole["turn_index"].to_pylist() == [0, 1] * 3
    assert pa.Table.from_batches(tk.scan_turns(tmp_path)).equals(whole)


@pytest.mark.parametrize("suffix_", ["arrows", "jsonl"])
@pytest.mark.parametrize("order", [scattered, list])
def test_each_piece_has_the_columns_of_all(tmp_path, small, suffix_, order):
    (log := tmp_path / "log").mkdir()
    records = order(some_sessions())
    for k, more in enumerate([{}, {"note": "n"}, {"size": 1}, {"size": 1.5}]):
        some = [{**record, **more} for record in records[9 * k :][:9]]
        write_log(some, log / f"{k}.{suffix_}")
    whole = tk.read_turns(log)
    assert pa.Table.from_batches(tk.scan_turns(log)).equals(whole)
    tk.run(log, lambda turns: turns, tmp_path / "out.arrow")
    assert tk.read_turns(tmp_path / "out.arrow").equals(whole)
    assert (whole["note"].null_count, whole["size"].type) == (24, pa.float64())


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "a.arrows").write_text("of the run before")
    (tmp_path / "b.arrows").symlink_to("a.arrows")
    write_table(pa.table({"x": [1]}), tmp_path / "b.arrows")
    assert sorted(os.listdir(tmp_path)) == ["a.arrows", "b.arrows"]
    assert not (tmp_path / "b.arrows").is_symlink()
    assert (tmp_path / "a.arrows").read_text() == "of the run before"


@pytest.mark.parametrize("suffix_", SUFFIXES)
def test_a_log_that_grows_while_it_is_gathered_is_refused(tmp_path, small, suffix_):
    """Sessions that the index does not have would be left out."""
    whole = scattered(some_sessions())
    log = tmp_path / f"a.{suffix_}"
    write_log(whole, log)
    source = tables.Log(tmp_path)
    index = source.index()
    write_log([*whole, *({**one, "session_id": "new"} for one in whole[:5])], log)
    with pytest.raises(FormatError, match=r"'new' was not there .* they changed since"):
        list(source.pieces(index))


def test_an_empty_file_of_lines_beside_turns_in_delta_form(tmp_path):
    turns = tk.compact(tk.from_records(some_sessions(3)))
    tk.write_turns(turns, tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(b"")
    assert tk.read_turns(tmp_path).equals(turns)


@pytest.mark.parametrize(
    ("result", "outputs", "text"),
    [
        (lambda rows: {"rows": rows}, {"rowz": "a.parquet"}, "outputs['rowz']"),
        (lambda rows: {"rows": rows}, "a.parquet", "only for 'rows'"),
        (lambda rows: rows, {"rows": "a.parquet"}, "only for 'its only result'"),
        (lambda rows: [], "a.parquet", "only for no name"),
        (lambda rows: None, "a.parquet", "returned NoneType"),
        (lambda rows: {"rows": rows, "n": 3}, {"rows": "a.parquet"}, "returned int"),
        (lambda rows: [rows], "a.parquet", "an object of type Table"),
        (
            lambda rows: rows,
            {"": "a.parquet", "b": "parts/"},
            "b parts/ is a directory",
        ),
        (lambda rows: rows, "parts/", "output parts/ is a directory"),
    ],
)
def test_a_stage_that_does_not_fit_its_outputs_is_refused(
    tmp_path, monkeypatch, result, outputs, text
):
    monkeypatch.chdir(tmp_path)
    records = [{"session_id": "a", "prompt_ids": [1], "output_ids": [2]}]
    tk.write_turns(tk.from_records(records), "log.parquet")
    with pytest.raises(ArgumentError, match=re.escape(text)):
        tk.run("log.parquet", lambda turns: result(tk.linearize(turns)), outputs)
    assert [*tmp_path.iterdir()] == [tmp_path / "log.parquet"]
