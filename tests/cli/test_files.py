"""What commands read and write: nothing is overwritten, merged, or lost without a word."""

import json
import os
import pickle
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.file_stages import linearize_file
from tests.made_tables import call
from trajkit import cli
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.export import files
from trajkit.files import sources
from trajkit.policies import PRESETS


def write(path, *calls):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in calls))
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with calls, turns, rows and a page, as the working directory."""
    monkeypatch.chdir(tmp_path)
    turns = tk.read_turns(write(tmp_path / "c.jsonl", call("a", [1, 2])))
    write(tmp_path / "run/c.jsonl", call("a", [1, 2]))
    tk.write_turns(turns, "t.parquet")
    tk.write_rows(tk.linearize(turns), "r.parquet")
    tk.write_rows(tk.linearize(turns), tmp_path / "run/r.parquet")
    Path("p.html").write_text("a page")
    os.symlink("c.jsonl", "link.jsonl")
    os.link("c.jsonl", "hard.jsonl")
    return tmp_path


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- no output replaces an input, or becomes one, or has another's name


# command | a part of the error
REFUSED = """
linearize t.parquet -o x.parquet --report t.parquet | which it would replace
linearize t.parquet -o x.parquet --rejected ./t.parquet | which it would replace
linearize c.jsonl -o x.parquet --sessions s --report s | which it would replace
linearize run -o run/c.jsonl | which it would replace
compact t.parquet -o t.parquet | which it would replace
expand c.jsonl t.parquet -o t.parquet | which it would replace
drift t.parquet -o t.parquet | which it would replace
import c.jsonl -o c.jsonl | which it would replace
import c.jsonl -o x.parquet --report c.jsonl | which it would replace
verify r.parquet t.parquet -o t.parquet | which it would replace
verify r.parquet t.parquet -o r.parquet | which it would replace
check r.parquet t.parquet -o r.parquet | which it would replace
pack r.parquet -o r.parquet --max-tokens 10 | which it would replace
view c.jsonl -o c.jsonl | which it would replace
view c.jsonl -o r.parquet --rows r.parquet | which it would replace
export out/rows.parquet --to sft -o out | out/rows.parquet
linearize run -o run/x.jsonl | the next run would take it for an input
expand run -o run/x.parquet | the next run would take it for an input
compact run -o run/parts/ | the next run would take it for an input
import run -o run/x.jsonl | the next run would take it for an input
drift run -o run/deep/../drift.jsonl | the next run would take it for an input
pack run -o run/packs.parquet --max-tokens 10 | the next run would take it for an input
linearize run/c.jsonl -o run/ | contains the input run/c.jsonl
linearize c.jsonl -o x.parquet --report x.parquet | are one path
linearize c.jsonl -o x.parquet --report X.parquet | are one path
linearize c.jsonl -o x.parquet --report ./x.parquet | are one path
view c.jsonl -o page.pdf | page.pdf
plot swimlanes c.jsonl -o lanes.json | lanes.json
export r.parquet --to sft -o rows.pdf | rows.pdf
linearize c.jsonl -o rows.txt | rows.txt
linearize c.jsonl -o x.parquet --report report.txt | report.txt
verify r.parquet t.parquet -o found.json | found.json
import c.jsonl --from records -o turns.txt | turns.txt
view c.jsonl -o p.html --no-clobber | exists, and --no-clobber is given
linearize c.jsonl -o t.parquet --no-clobber | exists, and --no-clobber is given
linearize c.jsonl -o x.parquet --report t.parquet --no-clobber | exists, and --no-clobber
export r.parquet --to sft -o out --no-clobber | exists, and --no-clobber is given
"""
SPELLINGS = [
    f"linearize {source} -o {output} | which it would replace"
    for source in ("c.jsonl", "link.jsonl", "hard.jsonl")
    for output in ("c.jsonl", "run/../c.jsonl", "link.jsonl")
]


@pytest.mark.parametrize("line", [*REFUSED.strip().split("\n"), *SPELLINGS])
def test_an_output_is_refused(place, capsys, line):
    command, words = line.split(" | ")
    write(place / "s", {"session_id": "a", "reward": 1.0})
    for folder in ("run/deep", "out"):
        (place / folder).mkdir()
    tk.write_rows(tk.read_rows("r.parquet"), "out/rows.parquet")
    before = contents(place)
    assert cli.main(command.split()) == cli.BAD_USAGE
    assert words in capsys.readouterr().err
    assert contents(place) == before


@pytest.mark.parametrize("output", ["run/x.parquet", "run/_x.jsonl", "run/rows/"])
def test_an_output_that_readers_skip_may_be_with_the_input(place, output):
    argv = ["linearize", "run", "-o", output, "--no-clobber"]
    assert cli.main(argv) == cli.DONE
    assert tk.read_turns("run").num_rows == 1


@pytest.mark.parametrize(
    "copy",
    [
        lambda: linearize_file("t.parquet", "t.parquet"),
        lambda: tk.importers.import_file("c.jsonl", "hard.jsonl"),
    ],
)
def test_functions_do_not_write_over_what_they_read(place, copy):
    before = contents(place)
    with pytest.raises(ArgumentError, match="replace"):
        copy()
    assert contents(place) == before


def test_a_file_may_be_replaced_by_what_a_scan_of_it_makes(place):
    """The new file takes its place when all of the old one was read."""
    turns = tk.read_turns("t.parquet")
    tk.write_turns(tk.scan_turns("t.parquet"), "t.parquet")
    assert tk.read_turns("t.parquet") == turns


def test_a_page_replaces_a_page_completely_or_not_at_all(place, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["view", "c.jsonl", "-o", "p.html"])
    monkeypatch.undo()
    assert (place / "p.html").read_text() == "a page"
    assert not list(place.glob(".p.html*"))


def test_a_case_insensitive_system_is_seen_by_the_inode(place, monkeypatch):
    """As where C.JSONL opens c.jsonl: both names have one device and inode."""
    own = sources.identity("c.jsonl")
    real = sources.identity
    spelled = lambda path: own if Path(path).name.lower() == "c.jsonl" else real(path)  # noqa: E731
    monkeypatch.setattr(sources, "identity", spelled)
    assert cli.main(["linearize", "c.jsonl", "-o", "C.JSONL"]) == cli.BAD_USAGE
    assert not Path("C.JSONL").exists()


# --- sessions of several files


def two_runs(folder):
    for step in (1, 2):
        calls = call(0, [step, 9]), call("0", [step, 9, 3, 6])
        write(folder / f"step{step}.jsonl", *calls)
    return folder


def scanned_turns(source, **options):
    return pa.Table.from_batches(tk.scan_turns(source, **options))


@pytest.mark.parametrize("read", [tk.read_turns, scanned_turns])
def test_a_session_that_starts_over_in_a_second_file_is_refused(tmp_path, read):
    log = two_runs(tmp_path / "log")
    words = r"session '0' is in .*step1\.jsonl and in .*step2\.jsonl"
    for source in (log, sorted(log.iterdir()), f"{log}/*.jsonl"):
        with pytest.raises(InvalidTurnsError, match=words):
            read(source)
    with pytest.raises(ArgumentError, match="session_prefix='files'"):
        read(log, session_prefix="files")
    turns = read(log, session_prefix="file")
    assert turns["session_id"].to_pylist() == ["step1/0"] * 2 + ["step2/0"] * 2
    assert turns["turn_index"].to_pylist() == [0, 1] * 2
    assert read(log, session_prefix="no")["session_id"].to_pylist() == ["0"] * 4


def test_commands_take_a_prefix(tmp_path, capsys):
    log, rows = str(two_runs(tmp_path / "log")), str(tmp_path / "rows.parquet")
    argv, prefix = ["linearize", log, "-o", rows], ["--session-prefix", "file"]
    assert cli.main(argv) == cli.BAD_DATA
    assert "--session-prefix file" in capsys.readouterr().err
    assert cli.main([*argv, *prefix]) == cli.DONE
    assert "sessions 2, turns 4" in capsys.readouterr().out
    assert cli.main(["verify", rows, log, *prefix]) == cli.DONE


def test_folders_tell_runs_apart_with_their_sessions(tmp_path):
    for step, reward in ((1, 0.5), (2, 1.0)):
        run = tmp_path / f"run{step}"
        write(run / "turns.jsonl", call("0", [step, 9]))
        line = {"session_id": ["0"], "reward": [reward]}
        tk.write_sessions(pa.table(line), run / "sessions.parquet")
    turns = tk.read_turns(tmp_path, session_prefix="folder")
    sessions = tk.read_sessions(tmp_path, session_prefix="folder")
    rows = tk.linearize(turns, sessions=sessions)
    pairs = zip(
        *(rows[name].to_pylist() for name in ("session_id", "reward")), strict=True
    )
    assert [*pairs] == [("run1/0", 0.5), ("run2/0", 1.0)]
    with pytest.raises(ArgumentError, match="take 'folder'"):
        tk.read_sessions(tmp_path, session_prefix="file")


@pytest.mark.parametrize("scattered", [False, True])
def test_scattered_sessions_are_told_apart_and_checked(
    tmp_path, monkeypatch, scattered
):
    """Also where sessions go through temporary files."""
    from trajkit.tables import limits

    monkeypatch.setattr(limits, "BUCKET_BYTES", 1)
    for step in (1, 2):
        calls = [call(name, [step, *range(9, 9 + k)]) for k in (1, 2) for name in "ab"]
        calls = calls if scattered else sorted(calls, key=lambda one: one["session_id"])
        write(tmp_path / f"step{step}.jsonl", *calls)
    with pytest.raises(InvalidTurnsError, match="its calls start over there"):
        list(tk.scan_turns(tmp_path))
    whole = tk.read_turns(tmp_path, session_prefix="file")
    scanned = scanned_turns(tmp_path, session_prefix="file")
    assert scanned.combine_chunks() == whole.combine_chunks()
    assert len({*whole["session_id"].to_pylist()}) == 4


def test_a_log_that_was_continued_is_one_session(tmp_path):
    """A later call extends an earlier prompt, be it of a sub-agent, or has its number."""
    write(tmp_path / "1.jsonl", call("s", [1, 2]), call("s", [7, 8]))
    write(tmp_path / "2.jsonl", call("s", [7, 8, 5]), call("s", [1, 2, 3, 4]))
    assert tk.read_turns(tmp_path)["turn_index"].to_pylist() == [0, 1, 2, 3]
    write(tmp_path / "2.jsonl", call("s", [6], turn_index=2))
    assert tk.read_turns(tmp_path)["turn_index"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_two_logs_that_number_the_same_turn_are_two_sessions(tmp_path, suffix):
    for name in "ab":
        turns = tk.from_records([call("s", [1, 2]), call("s", [1, 2, 3, 4])])
        tk.write_turns(turns, tmp_path / f"{name}.{suffix}")
    words = (
        rf"session 's' is in .*a\.{suffix} and in .*b\.{suffix}, and both have a turn"
    )
    for read in (tk.read_turns, lambda path: list(tk.scan_turns(path))):
        with pytest.raises(InvalidTurnsError, match=words):
            read(tmp_path)
    named = tk.read_turns(tmp_path, session_prefix="file")["session_id"].to_pylist()
    assert named == ["a/s", "a/s", "b/s", "b/s"]


def test_parts_of_a_table_are_one_table(tmp_path):
    turns = tk.from_records([call("s", [1]), call("s", [1, 3, 4]), call("t", [2])])
    tk.write_turns(turns.slice(1), tmp_path / "1.parquet")
    tk.write_turns(turns.slice(0, 1), tmp_path / "2.parquet")
    assert tk.read_turns(tmp_path)["turn_index"].to_pylist() == [0, 1, 0]


def test_a_file_given_twice_counts_once_or_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", call("s", [1]))
    with pytest.raises(ArgumentError, match="given twice"):
        tk.read_turns([path, tmp_path / "../" / tmp_path.name / "a.jsonl"])


# --- inputs as people have them


def test_json_is_an_array_or_lines(tmp_path):
    path, calls = tmp_path / "calls.json", [call("a", [1]), call("b", [2])]
    for text in (
        json.dumps(calls),
        json.dumps(calls, indent=1),
        "\n".join(map(json.dumps, calls)),
    ):
        path.write_text(text)
        assert tk.read_turns(path)["session_id"].to_pylist() == ["a", "b"]
        with path.open("rb") as file:
            assert tk.read_turns(file, format="json").num_rows == 2
        assert scanned_turns(path)["session_id"].to_pylist() == ["a", "b"]
    path.write_text(json.dumps(calls[0], indent=2))
    assert tk.read_turns(path).num_rows == 1
    for text, said in (
        ("[1, 2]", "item 1 is not a JSON object"),
        ("[{}", "line 1, column 4"),
        ("x", "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=said):
            tk.read_turns(path)


def test_json_settings_in_a_run_are_no_calls(tmp_path):
    write(tmp_path / "calls.jsonl", call("a", [1]))
    (tmp_path / "config.json").write_text('{"model": "m"}')
    assert tk.read_turns(tmp_path).num_rows == 1
    (tmp_path / "calls.jsonl").unlink()
    with pytest.raises(FormatError, match=r"a \.json file is read where its own path"):
        tk.read_turns(tmp_path)


def test_several_inputs_and_patterns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", call(name, [1]))
    for source in (["a.jsonl", "b.jsonl"], ["*.jsonl"], ["."]):
        assert cli.main(["linearize", *source, "-o", "rows.parquet"]) == cli.DONE
        assert "sessions 2" in capsys.readouterr().out
        assert cli.main(["simulate", *source]) == cli.DONE
        assert "turns 2" in capsys.readouterr().out
    assert cli.main(["simulate", "*.feather"]) == cli.BAD_FILE
    assert "*.feather: no file has such a name" in capsys.readouterr().err


READERS = """
linearize FILE -o x.parquet | compact FILE -o x.parquet | expand FILE -o x.parquet
drift FILE | simulate FILE | show FILE | why FILE | tree FILE | view FILE -o x.html
plot tokens FILE -o x.svg | import FILE -o x.parquet | verify FILE t.parquet
"""


@pytest.mark.parametrize("command", re.split(r" \| |\n", READERS.strip()))
@pytest.mark.parametrize("source", ["empty.jsonl", "empty.parquet"])
def test_an_empty_input_is_an_error_of_every_command(place, capsys, command, source):
    Path("empty.jsonl").write_text("")
    tk.write_turns(tk.from_records([]), "empty.parquet")
    assert cli.main(command.replace("FILE", source).split()) == cli.BAD_DATA
    assert not [*place.glob("x.*")]
    words = f"{source}: (no |a table of turns .* expected rows)"
    assert re.search(words, capsys.readouterr().err)


# --- errors name the place, and other sessions are shown


def test_an_error_names_file_and_line(tmp_path, capsys):
    write(tmp_path / "one.jsonl", call("a", [1]))
    write(tmp_path / "two.jsonl", call("c", [1]), call("b", [1]), call("b", [1, -7]))
    words = r"two\.jsonl, line 3: session 'b', turn 1: prompt_ids\[1\] is -7"
    for read in (tk.read_turns, lambda path: list(tk.scan_turns(path))):
        with pytest.raises(InvalidTurnsError, match=words):
            read(tmp_path)
    write(tmp_path / "two.jsonl", call("c", [1]), {**call("b", [1]), "session_id": 7.5})
    for read in (tk.read_turns, lambda path: list(tk.scan_turns(path))):
        with pytest.raises(InvalidTurnsError, match=r"two\.jsonl, line 2: record"):
            read(tmp_path)
    array = tmp_path / "array.json"
    array.write_text(json.dumps([call("c", [1]), call("b", [-1])]))
    with pytest.raises(InvalidTurnsError, match=r"array\.json, line 2: session 'b'"):
        tk.read_turns(array)


def test_an_error_in_a_table_names_its_file(tmp_path):
    lines = tk.from_records([call("a", [1]), call("it's", [2])]).to_pylist()
    for k, line in enumerate(lines):
        line["output_ids"] = [-1] if k else [3]
        table = pa.Table.from_pylist([line], tk.schema.TURNS)
        pq.write_table(table, tmp_path / f"{k}.parquet")
    with pytest.raises(
        InvalidTurnsError, match=r"/1\.parquet: session \"it's\", turn 0"
    ):
        tk.read_turns(tmp_path)


def test_nonfinite_logprobs_is_a_flag(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", call("a", [1], output_logprobs=[-9999.0]))
    for argv in (["show"], ["simulate"], ["linearize", "-o", f"{tmp_path}/r.parquet"]):
        argv = [argv[0], str(path), *argv[1:]]
        assert cli.main(argv) == cli.BAD_DATA
        assert "nonfinite_logprobs" in capsys.readouterr().err
        assert cli.main([*argv, "--nonfinite-logprobs", "null"]) == cli.DONE
    capsys.readouterr()


def half_a_run(tmp_path):
    """Session "b" lost its first turn, which has the body of a message."""
    user, reply = (dict(role=r, content="x") for r in ("user", "assistant"))
    first = {"prompt_messages": [user], "response_message": reply}
    later = {**first, "prompt_messages": [user, reply, user]}
    calls = [
        one
        for name in "ab"
        for one in (call(name, [1], [2], **first), call(name, [1, 2, 3], [4], **later))
    ]
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(calls).take([0, 1, 3]), path)
    return str(path)


@pytest.mark.parametrize("command", ["view", "show", "why", "tree"])
def test_a_bad_session_is_left_out_with_a_warning(tmp_path, capsys, command):
    turns, page = half_a_run(tmp_path), tmp_path / "page.html"
    options = ["-o", str(page)] if command == "view" else []
    assert cli.main([command, turns, *options]) == cli.DONE
    out, err = capsys.readouterr()
    assert err.startswith("trajkit: warning: session 'b' is left out: ")
    assert ("1 of 2 sessions" if options else "session a") in out
    assert page.exists() == bool(options)
    assert "session b" not in out


def test_verify_fails_for_sessions_that_it_cannot_check(tmp_path, capsys):
    turns = write(tmp_path / "turns.jsonl", call("a", [1], [2]), call("b", [1, -7]))
    one = {"session_id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}
    path = write(tmp_path / "rows.jsonl", one)
    assert cli.main(["verify", str(path), str(turns)]) == cli.BAD_DATA
    assert "not checked: sessions that break a rule: 1" in capsys.readouterr().out


def test_bad_sessions_alone_are_an_error(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", call("a", [1, -7]))
    assert cli.main(["view", str(path), "-o", f"{tmp_path}/p.html"]) == cli.BAD_DATA
    assert "a.jsonl, line 1: session 'a', turn 0: prompt_ids[1] is -7" in (
        capsys.readouterr().err
    )


# --- rows of other systems, unknown ids, rewards


def test_rows_of_other_systems_are_taken_by_every_command_for_rows(place, capsys):
    first = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}
    write(place / "rows.jsonl", first)
    for argv in (["show"], ["why"], ["verify"]):
        turns = ["c.jsonl"] if argv == ["verify"] else []
        assert cli.main([*argv, "rows.jsonl", *turns]) == cli.DONE
    out = capsys.readouterr().out
    assert "row 0: 3 tokens, 1 trained\ncontext     1 2\ntrained     3\n" in out
    assert (
        "row 0: it shares no token with an earlier row. It trains 1 token of 3." in out
    )
    write(
        place / "rows.jsonl",
        first,
        {"input_ids": [1, 2, 5, 6], "loss_mask": [1, 0, 1, 1]},
    )
    assert cli.main(["why", "rows.jsonl"]) == cli.DONE
    words = "it shares its first 2 tokens with row 0. It trains 3 tokens in 2 ranges"
    assert f"row 1: {words}" in capsys.readouterr().out


def test_ids_without_a_token_are_shown_as_ids(tmp_path, capsys):
    from tokenizers import Tokenizer, models

    words = models.WordLevel({"yes": 0, "no": 1}, unk_token="no")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "calls.jsonl", call("a", [0, 70001], [1, 90002]))
    options = ["--tokenizer", str(tmp_path)]
    assert cli.main(["show", str(path), *options]) == cli.DONE
    out = capsys.readouterr().out
    assert "yes⟨70001⟩" in out
    assert "no⟨90002⟩" in out
    page = tmp_path / "page.html"
    assert cli.main(["view", str(path), "-o", str(page), *options]) == cli.DONE
    from trajkit.cli.options import load_tokenizer
    from trajkit.view.tables import token_pieces

    pieces = token_pieces(load_tokenizer(tmp_path), [0, 90002])
    assert pieces["text"] == ["yes", "⟨90002⟩"]
    assert pieces["special"] == [0, 0]


def test_a_report_is_a_table_of_sessions(tmp_path, capsys):
    calls = [
        call(n, [1], [2, 3], reward=r, group_id="g") for n, r in (("a", 1), ("b", 0))
    ]
    path, rows = write(tmp_path / "c.jsonl", *calls), str(tmp_path / "rows.parquet")
    for suffix in ("parquet", "jsonl"):
        report = str(tmp_path / f"report.{suffix}")
        argv = ["linearize", str(path), "-o", rows, "--report", report]
        assert cli.main(argv) == cli.DONE
        out = tmp_path / suffix
        argv = ["export", rows, "--to", "tinker", "-o", str(out), "--sessions", report]
        assert cli.main(argv) == cli.DONE
        lines = map(json.loads, (out / "datums.jsonl").read_text().splitlines())
        gains = [{*line["loss_fn_inputs"]["advantages"]} - {0.0} for line in lines]
        # 0.5 or -0.5, over the two trained tokens of the row
        assert gains == [{0.25}, {-0.25}]
    capsys.readouterr()


# --- policy options


@pytest.mark.parametrize("command", ["show", "why", "tree"])
def test_commands_of_one_policy_have_its_choices(place, capsys, command):
    argv = [command, "c.jsonl", "--policy", "slime", "--set"]
    assert cli.main([*argv, "layout=all"]) == cli.BAD_USAGE
    assert "no choice 'layout'" in capsys.readouterr().err
    assert cli.main([*argv, "fork_threshold=3"]) == cli.DONE


def test_a_choice_belongs_to_the_policy_before_it(place, capsys):
    def simulated(*options):
        assert cli.main(["simulate", "c.jsonl", "--json", *options]) == cli.DONE
        lines = json.loads(capsys.readouterr().out)["policies"]
        return [line["policy"] for line in lines]

    options = ["--policy", "slime", "--set", "fork_threshold=3", "--policy", "slime"]
    assert simulated(*options) == ["slime(fork_threshold=3)", "slime"]
    every = simulated("--fork-threshold", "3")
    assert len(every) == len(PRESETS)
    assert [one for one in every if "(" in one] == [
        f"{name}(fork_threshold=3)" for name in ("slime", "trl", "miles")
    ]
    assert cli.main(["drift", "c.jsonl", "--fork-threshold", "3"]) == cli.BAD_USAGE


# --- packages


MISSING = {
    "this needs no_such_thing, which is not installed: pip install no_such_thing": (
        ModuleNotFoundError("No module named 'no_such_thing'", name="no_such_thing")
    ),
    "the installed pyarrow does not fit: cannot import name 'X'": ImportError(
        "cannot import name 'X' from 'pyarrow'", name="pyarrow.lib"
    ),
    # a fault of trajkit
    "": ModuleNotFoundError("No module named 'trajkit.no'", name="trajkit.no"),
}


@pytest.mark.parametrize("said", MISSING)
def test_a_missing_or_old_package_is_wrong_usage(place, monkeypatch, capsys, said):
    def fail(*_):
        raise MISSING[said]

    monkeypatch.setitem(files._WRITE, "sft", ("rows.parquet", fail))
    argv = ["export", "r.parquet", "--to", "sft", "-o", "out"]
    if not said:
        with pytest.raises(ModuleNotFoundError):
            cli.main(argv)
        return
    assert cli.main(argv) == cli.BAD_USAGE
    assert capsys.readouterr().err.startswith(f"trajkit: {said}")


# --- check: the rows of a trainer


CHECKED = [call("s", [10, 11], [20, 21, 22]), call("s", [10, 11, 20, 21, 22, 30], [23])]
ROW = [10, 11, 20, 21, 22, 30, 23]
RIGHT, SHIFTED = [0, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 0]


def checked(folder, capsys, rows, *options):
    log = write(folder / "log.jsonl", *CHECKED)
    code = cli.main(["check", str(rows), str(log), *options])
    return code, capsys.readouterr().out


def test_check_names_a_shifted_mask(tmp_path, capsys):
    right, wrong = (
        write(tmp_path / f"{name}.jsonl", {"input_ids": ROW, "loss_mask": mask})
        for name, mask in (("right", RIGHT), ("wrong", SHIFTED))
    )
    code, out = checked(tmp_path, capsys, right)
    assert code == cli.DONE
    assert out.startswith(
        "rows 1, tokens trained 4 (loss_mask); turns 2, tokens sampled 4\n"
    )
    assert "0    s               trains 3 of 3 tokens of turn 0\n" in out
    assert out.endswith("right: every trained token was sampled, and trains once\n")
    table = tmp_path / "found.parquet"
    assert checked(tmp_path, capsys, wrong, "-o", str(table))[0] == cli.BAD_DATA
    assert "mask_shifted" in pq.read_table(table)["kind"].to_pylist()
    code, out = checked(tmp_path, capsys, wrong, "--json")
    assert (code, json.loads(out)["wrong"]) == (cli.BAD_DATA, True)


def test_check_reads_what_trainers_save(tmp_path, capsys):
    sample = {"tokens": ROW, "response_length": 5, "loss_mask": RIGHT[2:]}
    (tmp_path / "rollout.pkl").write_bytes(pickle.dumps({"samples": [sample]}))
    write(tmp_path / "samples.jsonl", sample)
    for name in ("rollout.pkl", "samples.jsonl"):
        assert checked(tmp_path, capsys, tmp_path / name)[0] == cli.DONE
    rows, log = str(tmp_path / "samples.jsonl"), str(tmp_path / "log.jsonl")
    for argv, said in (
        (["show", rows], "trained     20 21 22"),
        (["why", rows], "It trains 4 tokens in 2 ranges of 7."),
        (["verify", rows, log, "--policy", "faithful"], "no violations"),
    ):
        assert cli.main(argv) == cli.DONE
        assert said in capsys.readouterr().out


def test_check_shows_few_lines_of_many_rows(tmp_path, capsys):
    rows = [{"input_ids": ROW, "loss_mask": [0, 0, 1, 1, 1, 1, 1]}] * 50
    code, out = checked(tmp_path, capsys, write(tmp_path / "rows.jsonl", *rows))
    assert code == cli.BAD_DATA
    assert len(out.splitlines()) <= 21
    assert "and 47 more rows, in the table of --out\n" in out
    assert ["not", "sampled", "50", "50"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [ROW], "loss_mask": [RIGHT]}, "row 0: input_ids has lists"),
        ({"input_ids": [1, "x"], "loss_mask": [0, 1]}, "row 0: Could not convert 'x'"),
    ],
)
def test_rows_with_odd_values_are_refused_with_their_line(tmp_path, capsys, row, said):
    rows = write(tmp_path / "rows.jsonl", row)
    log = write(tmp_path / "log.jsonl", *CHECKED)
    for argv in (["check", rows, log], ["show", rows], ["why", rows]):
        assert cli.main([*map(str, argv)]) in (cli.BAD_DATA, cli.BAD_FILE)
        err = capsys.readouterr().err
        assert "rows.jsonl" in err
        assert said in err


def test_simulate_names_systems_as_they_were_given(tmp_path, capsys):
    log = str(write(tmp_path / "log.jsonl", *CHECKED))
    names = ["verl", "areal", "rllm"]
    options = [text for name in names for text in ("--policy", name)]
    assert cli.main(["simulate", log, *options]) == cli.DONE
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[4:7]] == names
    assert "same rule" not in out


@pytest.mark.parametrize("command", ["check", "verify"])
def test_commands_without_a_policy_say_so(capsys, command):
    assert cli.main(["help", command]) == cli.DONE
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: faithful)" not in out
    assert "(default: rows of any policy)" in out


def test_check_shows_the_text_of_a_finding(tmp_path, capsys):
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"w{k}": k for k in range(40)}, unk_token="w0")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    mask = [0, 0, 1, 1, 1, 1, 1]
    rows = write(tmp_path / "rows.jsonl", {"input_ids": ROW, "loss_mask": mask})
    out = checked(tmp_path, capsys, rows, "--tokenizer", str(tmp_path))[1]
    assert "trains 1 token that nobody sampled: 30  w20·w21·w22·[w30]·w23\n" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no rows, nothing to do"),
        ([{"text": "a"}], "row 0 has the columns text: expected ids"),
    ],
)
def test_check_refuses_what_has_no_rows(tmp_path, capsys, content, said):
    log = write(tmp_path / "log.jsonl", *CHECKED)
    rows = write(tmp_path / "rows.jsonl", *content)
    argv = ["check", str(rows), str(log)]
    assert cli.main(argv) == cli.BAD_DATA
    assert said in capsys.readouterr().err
    assert cli.main([*argv, "--set", "train_in=first"]) == cli.BAD_USAGE


def test_every_command_reads_what_is_at_an_address(tmp_path, capsys):
    turns, rows = tmp_path / "turns.parquet", tmp_path / "rows.parquet"
    table = tk.from_records([call("a", [1, 2])])
    tk.write_turns(table, turns)
    tk.write_rows(tk.linearize(table), rows)
    out = str(tmp_path / "out.parquet")
    for argv in (
        ["linearize", turns.as_uri(), "-o", out],
        ["check", rows.as_uri(), turns.as_uri()],
        ["show", rows.as_uri()],
    ):
        assert cli.main(argv) == cli.DONE, argv
    assert tk.read_rows(out) == tk.read_rows(rows)
    capsys.readouterr()
    absent = (tmp_path / "absent.parquet").as_uri()
    assert cli.main(["show", absent]) == cli.BAD_FILE
    assert f"{absent}: no such file" in capsys.readouterr().err


def test_a_prompt_that_is_sent_again_has_one_name_in_all_commands(tmp_path, capsys):
    log, out = str(tmp_path / "log.jsonl"), str(tmp_path / "drift.parquet")
    calls = [
        call("s", [1, 2, 3], [4, 5]),
        call("s", [1, 2, 3], [6, 7]),
        call("s", [1, 2, 3, 6, 7, 8], [9]),
        call("s", [1, 2, 3, 6], [11]),
        call("s", [1, 2, 3, 12], [13]),
    ]
    write(tmp_path / "log.jsonl", *calls)
    assert cli.main(["drift", log, "-o", out]) == cli.DONE
    causes = ["clean", "rollback", "tail_changed"]
    assert pq.read_table(out)["cause"].to_pylist() == causes
    capsys.readouterr()
    for command, said in (
        ("tree", ("3, output 2, retry\n", "4, output 1, rollback\n")),
        (
            "why",
            ("it is a retry: the prompt of turn 0", "it is a rollback: it departs"),
        ),
    ):
        assert cli.main([command, log]) == cli.DONE
        out = capsys.readouterr().out
        assert all(words in out for words in said)
