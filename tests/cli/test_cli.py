"""The command line, in process but for one run from outside."""

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cyclopts import App, Parameter

import trajkit as tk
from tests.made_tables import linearized
from trajkit import cli
from trajkit.analysis.tokenizer import Codec
from trajkit.cli import application
from trajkit.cli.policies import policy_of
from trajkit.cli.screen import Progress
from trajkit.cli.show import marked
from trajkit.cli.tokenizer import load_tokenizer
from trajkit.errors import PolicyError
from trajkit.files.tables import iter_tables
from trajkit.policies import PRESETS, rule_of

ROOT = Path(__file__).parents[2]


def call(session, prompt, output, messages=None, response=None):
    return {
        "session_id": session,
        "prompt_ids": prompt,
        "output_ids": output,
        "output_logprobs": [-0.5] * len(output),
        "finish_reason": "stop",
        "prompt_messages": messages,
        "response_message": response,
    }


QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
MORE = {"role": "user", "content": "more"}

# Session "a" comes back with the last token of its reply changed, "b" comes back clean.
CALLS = [
    call("a", [1, 2], [3, 4, 5], [QUESTION], ANSWER),
    call("a", [1, 2, 3, 4, 9, 6], [7], [QUESTION, ANSWER, MORE], ANSWER),
    call("b", [1, 2], [3, 4, 5], [QUESTION], ANSWER),
    call("b", [1, 2, 3, 4, 5, 6], [7], [QUESTION, ANSWER, MORE], ANSWER),
]


@pytest.fixture
def turns(tmp_path):
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(CALLS), path)
    return str(path)


def run_json(capsys, *argv, code=cli.DONE):
    assert cli.main([*argv, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ([], {}),
        (
            ["--policy", "slime", "--fork-threshold", "0"],
            {"policy": tk.policy("slime", fork_threshold=0)},
        ),
        (["--policy", "strict"], {"policy": "strict"}),
        (
            ["--policy", "per_call", "--max-row-tokens", "6"],
            {"policy": "per_call", "max_row_tokens": 6},
        ),
        (["--reward", "0.25"], {"reward": 0.25}),
    ],
)
def test_linearize_writes_what_the_function_gives(
    tmp_path, capsys, turns, options, choices
):
    rows = tmp_path / "rows.parquet"
    report = tmp_path / "report.parquet"
    printed = run_json(
        capsys, "linearize", turns, "-o", str(rows), "--report", str(report), *options
    )
    expected_rows, expected_report = linearized(tk.from_records(CALLS), **choices)
    assert tk.read_rows(rows).equals(expected_rows)
    assert pq.read_table(report).to_pylist() == expected_report.to_pylist()
    assert printed["sessions"] == 2
    assert printed["turns"] == 4
    assert printed["rows"] == expected_rows.num_rows
    assert printed["tokens_sampled"] == 8
    trained = sum(sum(mask) for mask in expected_rows["loss_mask"].to_pylist())
    assert printed["tokens_trained"] == trained


def test_drift_of_a_policy_that_compares_nothing(capsys, turns):
    summary = run_json(capsys, "drift", turns, "--policy", "per_call")
    assert (summary["turns_compared"], summary["groups"]) == (0, [])


def test_linearize_tells_people_what_was_lost(tmp_path, capsys, turns):
    rows = str(tmp_path / "rows.jsonl")
    assert cli.main(["linearize", turns, "-o", rows, "--policy", "slime"]) == 0
    out, err = capsys.readouterr()
    assert "sessions 2, turns 4, 2 rows; left out: 0 without a trained token" in out
    assert ["sampled", "8"] in [line.split() for line in out.splitlines()]
    assert ["lost,", "absorbed", "3", "37.5", "%"] in [
        line.split() for line in out.splitlines()
    ]
    assert rows in out
    assert err == ""


def test_drift_counts_by_region_and_cause(tmp_path, capsys, turns):
    table = tmp_path / "drift.parquet"
    summary = run_json(capsys, "drift", turns, "-o", str(table))
    assert summary["sessions"] == 2
    assert summary["turns"] == 4
    assert summary["turns_compared"] == 2
    assert summary["tokens_sampled"] == 8
    assert summary["groups"] == [
        {
            "region": "last_reply",
            "cause": "tail_changed",
            "turns": 1,
            "tokens_beyond": 1,
            "tokens_after_drift": 1,
        },
        {
            "region": "none",
            "cause": "clean",
            "turns": 1,
            "tokens_beyond": 0,
            "tokens_after_drift": 0,
        },
    ]
    assert pq.read_table(table)["size"].to_pylist() == [1, 0]
    assert cli.main(["drift", turns]) == cli.DONE
    assert "last_reply  tail_changed" in capsys.readouterr().out


# code | command, with {turns} and the files of `refusing` | a part of the line on stderr
REFUSALS = r"""
2 | linearize {turns} -o r.parquet --policy slim | policy 'slim'
2 | policies slim | policy 'slim' does not exist
2 | drift {turns} --policy strict --fork-threshold 9 | 'strict' ignores fork_threshold
2 | flatten | Unknown command "flatten"
2 | linearize in | requires an argument
2 | linearize in -o out --max-row-tokens 0 | Must be >= 1
2 | linearize in -o out --max-row-tokens x | unable to convert "x" into int
2 | linearize x -o y --polcy slime | Did you mean --policy?
2 | linearize x -o y --weigh-by rows | Did you mean "row"?
2 | import x -o y --from opena | Did you mean "openai
2 | linearize x -o y z | unrecognized arguments: z
2 | simulat x | Did you mean "simulate"?
2 | linearize in -o out --reward 1 --sessions s.jsonl | --reward: not allowed
2 | drift {turns} --findings x.parquet | --findings needs --tokenizer
3 | drift absent.parquet | absent.parquet
3 | drift garbage.parquet | garbage.parquet
2 | linearize {turns} -o rows.xlsx | rows.xlsx
3 | linearize {turns} -o absent/rows.parquet | No such file or directory
3 | compact {turns} -o small.jsonl | JSON lines cannot store turns in delta form
3 | drift {turns} --tokenizer nowhere.json | nowhere.json: there is no such file or folder
3 | drift {turns} --tokenizer bad.json | not a tokenizer
1 | drift strange.parquet | session_id
1 | drift twice.parquet | session 'a', turn 0
2 | simulate in --set train_in=first | --set train_in=first needs a --policy before it
2 | drift in --set own | --set 'own': expected CHOICE=VALUE
2 | drift in --set =first | --set '=first': expected CHOICE=VALUE
2 | verify {turns} {turns} --set train_in=first | --set and --fork-threshold need --policy
2 | drift in --policy trl --fork-threshold 3 --set fork_threshold=2 | is given twice
2 | drift in SET trains_in=first | did you mean 'train_in'?: expected one
2 | verify in in SET name=x | name is given twice
2 | simulate in SET builder=per_request | no choice 'builder'
2 | linearize in -o r SET train_in=last | train_in='last'
2 | drift in SET merge_rewrites=yes | merge_rewrites='yes': expected a bool
2 | verify in in SET fork_threshold=x | fork_threshold='x'
2 | drift in SET max_rows=x | max_rows='x'
2 | simulate in SET max_rows=0 | max_rows=0: expected an integer of 1
2 | drift in SET merge_rewrites=true --set merge_rewrites=false | is given twice
2 | drift in SET on_drift=absorb_any --set train_in=earliest | does not go with on_drift=
2 | drift in SET on_drift=fork --set merge_rewrites=false --set fork_threshold=9 | ignores
"""


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.parquet").write_bytes(b"garbage")
    (tmp_path / "bad.json").write_text("{}")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "strange.parquet")
    table = tk.from_records(CALLS[:1])
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "twice.parquet")


@pytest.mark.parametrize("line", REFUSALS.strip().splitlines())
def test_what_is_wrong_is_one_line_and_a_code(refusing, capsys, turns, line):
    code, command, said = line.split(" | ")
    command = command.replace("SET", "--policy slime --set").format(turns=turns)
    before = sorted(os.listdir())
    assert cli.main(command.split()) == int(code)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trajkit: ")
    assert err.count("\n") == 1
    assert said in err
    assert sorted(os.listdir()) == before


def test_a_torn_log_is_read_with_a_warning_of_one_line(tmp_path, capsys):
    log = tmp_path / "turns.jsonl"
    whole = "".join(f"{json.dumps(each)}\n" for each in CALLS)
    log.write_text(whole + whole[:30])
    assert cli.main(["drift", str(log), "--json"]) == cli.DONE
    out, err = capsys.readouterr()
    assert json.loads(out)["turns"] == len(CALLS)
    assert err.startswith("trajkit: warning: ")
    assert err.count("\n") == 1
    assert "turns.jsonl" in err


def test_interrupted(monkeypatch, capsys, turns):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tk, "link", interrupt)
    assert cli.main(["drift", turns]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "trajkit: interrupted\n"


def test_commands_come_from_entry_points(monkeypatch, capsys):
    def hello(name: str, /, *, loud: bool = False) -> int:
        """Greet.

        Parameters
        ----------
        loud
            Shout.
        """
        sys.stdout.write(f"hello {name}{'!' * loud}\n")
        return 7

    class Entry:
        name = "hello"

        def load(self):
            return hello

    monkeypatch.setattr(application, "entry_points", lambda group: [Entry()])
    assert cli.main(["hello", "you", "--loud"]) == 7
    assert capsys.readouterr().out == "hello you!\n"
    assert cli.main(["help", "hello"]) == cli.DONE
    assert "Shout." in capsys.readouterr().out


@pytest.mark.parametrize("command", ["drift", "tree", "help"])
def test_from_outside_with_nobody_reading(turns, command):
    """The process ends quietly when the reader of its output has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from trajkit.cli import main; sys.exit(main())"
    files = [] if command == "help" else [turns]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code, command, *files],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == cli.CLOSED_PIPE
    assert done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for terminal, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("linearize", "turns") as bar:
            bar.begin(125, 1)
            for _ in range(4):
                bar.advance(31)
        text = terminal.getvalue()
        assert ("linearize" in text) is shown
        assert ("100%" in text) is shown
        assert bool(text) is shown
        with Progress("packing"):
            pass
        assert ("packing" in terminal.getvalue()) is shown


def test_every_entry_point_is_a_command(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, value in project["entry-points"]["trajkit.commands"].items():
        app = App(default_parameter=Parameter(negative=()))
        app.command(EntryPoint(name, value, "trajkit.commands").load(), name=name)
        app.help_print([name])
        assert f"Usage: {app.name[0]} {name}" in capsys.readouterr().out


def test_simulate_says_what_keeps_everything(capsys, turns):
    printed = run_json(capsys, "simulate", turns, "--pad", "8")
    expected = tk.simulate(tk.from_records(CALLS), pad_to=8).to_pylist()
    assert printed == {"cheapest": "faithful", "policies": expected}
    argv = ["simulate", turns, "--policy", "slime", "--policy", "strict"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == "turns 4, tokens sampled 8".split()
    assert lines[2][:6] == ["policy", "rows", "trained", "of", "sampled", "lost"]
    assert lines[4] == "slime 2 5 62.5 % 3 14 14 7".split()
    assert lines[-1] == "keeps everything at the lowest cost: strict".split()
    assert (
        "slime loses 3 tokens (absorbed). Drift: its row continued with the next "
        "prompt's ids instead.\nlose nothing: strict\nsame rule: interleave as strict\n"
    ) in text
    assert cli.main([*argv, "--wide"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[4] == "slime 2 5 62.5 % 3 0 14 14 7".split()


@pytest.mark.parametrize("options", [[], ["--pad", "1024"], ["--pack", "8192"]])
def test_simulate_fits_100_columns(tmp_path, capsys, options):
    """With numbers of ten digits, and every preset."""
    calls = [
        call(name, [1] * 9000, [2, *range(900)], [QUESTION], ANSWER)
        for name in ("a", "b")
    ]
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(calls), path)
    options = [*options, "--policy", "slime", "--set", "fork_threshold=123456"]
    assert cli.main(["simulate", str(path), *options]) == cli.DONE
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "forward" in text


def test_simulate_counts_packs(capsys, turns):
    printed = run_json(capsys, "simulate", turns, "--pack", "8")["policies"]
    expected = tk.simulate(tk.from_records(CALLS), pack_tokens=8).to_pylist()
    assert printed == expected
    argv = ["simulate", turns, "--policy", "strict", "--pack", "8"]
    assert cli.main(argv) == 0
    assert " packs  packed " in capsys.readouterr().out.splitlines()[2]
    assert cli.main([*argv, "--wide"]) == 0
    head = capsys.readouterr().out.splitlines()[2]
    assert head.endswith("packed  shared once  longest row  attended pairs")


@pytest.mark.parametrize("name", application.COMMANDS)
def test_help_of_a_command_is_its_help(capsys, name):
    texts = []
    for argv in (["help", name], [name, "--help"]):
        assert cli.main(argv) == cli.DONE
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"Usage: trajkit {name}")
    path, first_line = application.COMMANDS[name]
    module, _, function = path.partition(":")
    found = getattr(import_module(f"trajkit.cli.{module}"), function)
    assert found.__doc__.partition("\n")[0] == first_line


def test_help_lists_commands_and_suggests_one(capsys):
    assert cli.main(["help"]) == cli.DONE
    assert "Say whether a trainer's mask trains what was sampled" in (
        capsys.readouterr().out
    )
    assert cli.main(["help", "simulat"]) == cli.BAD_USAGE
    assert 'Did you mean "simulate"?' in capsys.readouterr().err


def test_pack_writes_packs(tmp_path, capsys, turns):
    rows, packs = str(tmp_path / "rows.parquet"), str(tmp_path / "packs.parquet")
    table = tk.linearize(tk.from_records(CALLS))
    tk.write_rows(table, rows)
    options = ["--max-tokens", "12"]
    assert cli.main(["pack", rows, "-o", packs, *options]) == cli.DONE
    found = next(iter_tables(packs))
    expected = tk.pack(table, 12)
    assert found.to_pylist() == expected.to_pylist()
    assert tk.verify_packs(found, table).num_rows == 0
    n_tokens = sum(expected["n_tokens"].to_pylist())
    assert capsys.readouterr().out.startswith(
        f"{table.num_rows} rows in {expected.num_rows} packs: {n_tokens} tokens, "
    )
    assert cli.main(["pack", rows, "-o", packs, "--max-tokens", "1"]) == cli.BAD_DATA
    assert "max_tokens is 1" in capsys.readouterr().err


def test_what_commands_for_rows_print_as_json(tmp_path, monkeypatch, capsys, turns):
    monkeypatch.chdir(tmp_path)
    rows = tk.linearize(tk.from_records(CALLS))
    tk.write_rows(rows, "rows.parquet")
    argv = ["pack", "rows.parquet", "-o", "packs.parquet", "--max-tokens", "12"]
    packs, n = tk.pack(rows, 12), rows.num_rows
    found = run_json(capsys, *argv)
    assert (found["rows"], found["packs"]) == (n, packs.num_rows)
    assert found["tokens"] == sum(packs["n_tokens"].to_pylist())
    argv = ["export", "rows.parquet", "--to", "sft", "-o", "out"]
    assert run_json(capsys, *argv) == {
        "output": str(Path("out/rows.parquet")),
        "rows": n,
        "to": "sft",
    }
    expected = tk.analysis.why(tk.from_records(CALLS)).to_pylist()
    assert run_json(capsys, "why", turns) == {"rows": expected}


def test_verify_finds_nothing_in_rows_that_are_right(tmp_path, capsys, turns):
    rows = str(tmp_path / "rows.jsonl")
    tk.write_rows(tk.linearize(tk.from_records(CALLS), "slime"), rows)
    assert run_json(capsys, "verify", rows, turns, "--policy", "slime") == {
        "violations": []
    }
    assert cli.main(["verify", rows, turns, "--policy", "slime"]) == cli.DONE
    assert capsys.readouterr().out == "no violations\n"


def test_verify_exits_with_1_on_a_violation(tmp_path, capsys, turns):
    rows = str(tmp_path / "rows.parquet")
    found = str(tmp_path / "found.jsonl")
    table = tk.linearize(tk.from_records(CALLS), "slime")
    tk.write_rows(table, rows)
    assert cli.main(["verify", rows, turns]) == cli.DONE
    assert "without --policy, only what is true" in capsys.readouterr().out
    argv = ["verify", rows, turns, "--policy", "faithful"]
    assert cli.main([*argv, "-o", found]) == cli.BAD_DATA
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["not_trained", "1"] in lines
    written = [json.loads(line) for line in Path(found).read_text().splitlines()]
    assert cli.main([*argv, "--json"]) == cli.BAD_DATA
    violations = json.loads(capsys.readouterr().out)["violations"]
    assert violations == written
    assert ("a", 0, "not_trained") in {
        (one["session_id"], one["turn_index"], one["rule"]) for one in violations
    }


def test_verify_shows_the_first_violations_of_many(tmp_path, capsys, turns):
    rows = tmp_path / "rows.jsonl"
    row = {"session_id": "a", "input_ids": [8] * 50, "loss_mask": [1, 0] * 25}
    rows.write_text(json.dumps(row))
    argv = ["verify", str(rows), turns, "--policy", "faithful"]
    assert cli.main(argv) == cli.BAD_DATA
    out = capsys.readouterr().out
    assert "and 9 more" in out
    assert ["mask", "25"] in [line.split() for line in out.splitlines()]


# --- drift with a tokenizer

TOKENIZER = ROOT / "shim/trajkit_shim/engines/embedded/tokenizer.json"


@pytest.fixture
def spoken(tmp_path):
    """Turns of two sessions: white space goes missing in one, nothing in the other."""
    tokenizer = load_tokenizer(TOKENIZER)

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    head, end = ids("<|im_start|>assistant\n"), ids("<|im_end|>")
    reply = ids("It holds. \n") + end
    calls = [
        call(session, head, reply)
        if shown is None
        else call(session, head + shown, end)
        for session, replayed in (("a", ids("It holds.") + end), ("b", reply))
        for shown in (None, replayed)
    ]
    path = tmp_path / "spoken.parquet"
    tk.write_turns(tk.from_records(calls), path)
    return str(path)


@pytest.mark.parametrize("where", ["file", "directory"])
def test_drift_says_why_with_a_tokenizer(tmp_path, capsys, spoken, where):
    path = TOKENIZER if where == "file" else TOKENIZER.parent
    written = tmp_path / "findings.parquet"
    argv = [spoken, "--tokenizer", str(path), "--policy", "trl"]
    said = run_json(capsys, "drift", *argv, "--findings", str(written))
    by_cause = {group["cause"]: group["turns"] for group in said["groups"]}
    assert by_cause == {"white_space": 1, "clean": 1}
    (group,) = said["causes"]
    example = said["examples"]["white_space"]
    assert (group["cause"], group["findings"], group["turns"]) == ("white_space", 1, 1)
    assert (example["path_text"], example["prompt_text"]) == (" \n", "")
    assert pq.read_table(written)["path_text"].to_pylist() == [" \n"]
    assert cli.main(["drift", *argv]) == cli.DONE
    out, _ = capsys.readouterr()
    assert "white_space: session 'a', turn 1, from token" in out
    assert "1 of 1: white space changed\n" in out
    assert "  path    ol·ds·.·[ |\\n]·<|im_end|>\n" in out
    assert "  prompt  ol·ds·.·[]·<|im_end|>\n" in out


@pytest.mark.parametrize(
    ("path", "library"),
    [(TOKENIZER, "tokenizers"), (ROOT / "tests", "transformers")],
)
def test_a_library_that_is_missing_is_named(monkeypatch, capsys, turns, path, library):
    monkeypatch.setitem(sys.modules, library, None)
    argv = ["drift", turns, "--tokenizer", str(path)]
    assert cli.main(argv) == cli.BAD_USAGE
    assert f"pip install {library}" in capsys.readouterr().err


def test_tokens_of_an_example_are_apart_and_harmless():
    codec = Codec(load_tokenizer(TOKENIZER))
    tokens = codec.ids("print" + "ab" * 20 + "\x1b[2J")
    first = marked(codec, tokens, 1, 2)
    assert first.startswith(f"{codec.text(tokens[:1])}·[{codec.text(tokens[1:2])}]·")
    everything = marked(codec, tokens, 0, len(tokens))
    assert f"|... {len(tokens) - 24:,} tokens ...|" in everything
    assert everything.endswith("|2|J]")
    assert "\\x1b" in everything
    assert "\x1b" not in everything
    assert marked(codec, tokens, 0, 0).startswith("[]·")


def test_causes_say_who_changed_the_text(tmp_path, capsys):
    tokenizer = load_tokenizer(TOKENIZER)

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    head, end = ids("<|im_start|>assistant\n"), ids("<|im_end|>")
    shown = {**ANSWER, "content": "b"}
    calls = [
        one
        for session, repeated in (("a", ANSWER), ("b", shown), ("c", ANSWER))
        for one in (
            call(session, head, ids("It holds. \n") + end, [QUESTION], ANSWER),
            call(
                session,
                head + ids("It holds.") + end,
                end,
                [QUESTION, repeated, MORE],
                ANSWER,
            ),
        )
    ]
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(calls), path)
    argv = [str(path), "--tokenizer", str(TOKENIZER), "--policy", "trl"]
    causes = run_json(capsys, "drift", *argv)["causes"]
    origins = {group["origin"]: group["findings"] for group in causes}
    assert origins == {"template": 2, "rewritten": 1}
    assert cli.main(["drift", *argv]) == cli.DONE
    out = capsys.readouterr().out
    assert "2 of 3: white space changed by the template\n" in out
    assert "1 of 3: white space changed by the client\n" in out


# The forms of turns


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])
def test_compact_and_expand_change_the_form_of_a_file(tmp_path, capsys, turns, suffix):
    small, back = str(tmp_path / f"small.{suffix}"), str(tmp_path / "back.jsonl.gz")
    said = run_json(capsys, "compact", turns, "-o", small)
    assert said == {
        "output": small,
        "turns": 4,
        "bytes_before": os.path.getsize(turns),
        "bytes_after": os.path.getsize(small),
    }
    assert tk.read_turns(small) == tk.compact(tk.read_turns(turns))
    said = run_json(capsys, "expand", small, "-o", back)
    assert said["turns"] == 4
    assert tk.read_turns(back) == tk.read_turns(turns)


def test_linearize_stores_shared_tokens_once(tmp_path, capsys, turns):
    out = str(tmp_path / "rows.parquet")
    run_json(capsys, "linearize", turns, "-o", out, "--dedup")
    assert "suffix_ids" in pq.read_schema(out).names
    assert tk.read_rows(out) == tk.linearize(tk.read_turns(turns))
    assert cli.main(["verify", out, turns]) == cli.DONE


# --- choices of a policy, and what is known of sessions


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (
            ["slime", "--set", "fork_threshold=0", "--set", "merge_rewrites=false"],
            tk.policy("slime", fork_threshold=0, merge_rewrites=False),
        ),
        (
            ["faithful", "--set", "train_in=earliest"],
            tk.policy("faithful", train_in="earliest"),
        ),
        (
            ["segments", "--set", "max_rows=2", "--set", "dispatch_tools=Task,spawn"],
            tk.policy("segments", max_rows=2, dispatch_tools=("Task", "spawn")),
        ),
        (
            ["segments", "--set", "max_rows=none", "--set", "dispatch_tools="],
            tk.policy("segments", dispatch_tools=()),
        ),
        (
            ["polar", "--set", "builder=per_request"],
            tk.policy("polar", builder="per_request"),
        ),
    ],
)
def test_set_makes_a_choice(tmp_path, capsys, turns, options, policy):
    rows = str(tmp_path / "rows.parquet")
    argv = ["linearize", turns, "-o", rows, "--policy", *options]
    said = run_json(capsys, *argv)["policy"]
    assert {**said, "dispatch_tools": tuple(said["dispatch_tools"])} == asdict(policy)
    assert tk.read_rows(rows) == tk.linearize(tk.read_turns(turns), policy)
    checked = run_json(capsys, "verify", rows, turns, "--policy", *options)
    assert checked == {"violations": []}
    assert run_json(capsys, "drift", turns, "--policy", *options)["policy"] == said


def test_simulate_compares_a_policy_with_itself(capsys, turns):
    argv = ["--policy", "trl", "--policy", "trl", "--set", "fork_threshold=1"]
    printed = run_json(capsys, "simulate", turns, *argv)["policies"]
    policies = ["trl", tk.policy("trl", fork_threshold=1)]
    assert printed == tk.simulate(tk.read_turns(turns), policies).to_pylist()
    assert [line["policy"] for line in printed] == ["trl", "trl(fork_threshold=1)"]


SESSIONS = [
    {"session_id": "b", "reward": 1.0, "group_id": "g"},
    {"session_id": "a", "reward": None, "group_id": "g", "error": "timed out"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_sessions_say_rewards_groups_and_errors(tmp_path, capsys, turns, suffix):
    file, rows = str(tmp_path / f"known.{suffix}"), str(tmp_path / "rows.parquet")
    known = pa.Table.from_pylist(SESSIONS, tk.schema.SESSIONS)
    if suffix == "jsonl":
        Path(file).write_text("".join(f"{json.dumps(one)}\n" for one in SESSIONS))
    else:
        pq.write_table(known, file)
    said = run_json(
        capsys, "linearize", turns, "-o", rows, "--policy", "slime", "--sessions", file
    )
    assert (said["tokens_trained"], said["lost_untrainable"]) == (4, 4)
    expected = tk.linearize(tk.read_turns(turns), "slime", sessions=known)
    assert expected["reward"].to_pylist() == [1.0]
    assert tk.read_rows(rows) == expected
    (line,) = run_json(
        capsys, "simulate", turns, "--policy", "slime", "--sessions", file
    )["policies"]
    assert line["lost_untrainable"] == 4
    argv = ["verify", rows, turns, "--policy", "slime"]
    assert run_json(capsys, *argv, "--sessions", file) == {"violations": []}
    assert cli.main([*argv, "--reward", "2"]) == cli.BAD_DATA
    assert ["reward", "1"] in [x.split() for x in capsys.readouterr().out.splitlines()]


def test_sessions_must_know_every_session(tmp_path, capsys, turns):
    known, rows = tmp_path / "known.jsonl", str(tmp_path / "rows.parquet")
    known.write_text(json.dumps(SESSIONS[0]))
    argv = ["linearize", turns, "-o", rows, "--sessions", str(known)]
    assert cli.main(argv) == cli.BAD_DATA
    assert "session 'a' has turns, but no line in sessions" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["row", "rollout"])
def test_rows_are_weighed(tmp_path, capsys, turns, by):
    rows = str(tmp_path / "rows.parquet")
    argv = ["linearize", turns, "-o", rows, "--weigh-by", by]
    run_json(capsys, *argv)
    expected = tk.add_weights(tk.linearize(tk.read_turns(turns)), by)
    assert tk.read_rows(rows) == expected
    argv = ["verify", rows, turns, "--weigh-by"]
    assert cli.main([*argv, by]) == cli.DONE
    assert cli.main([*argv, "token"]) == cli.BAD_DATA


def test_policies_are_listed(capsys):
    listed = run_json(capsys, "policies")
    assert [one["name"] for one in listed] == list(PRESETS)
    assert cli.main(["policies"]) == cli.DONE
    lines = capsys.readouterr().out.splitlines()
    for name in ("strict", "interleave"):
        (line,) = (line for line in lines if line.startswith(name))
        assert line.split("  ")[-1].strip() == "parent_by=tokens, train_aborted=true"
    assert any("keep_untrained=true" in line for line in lines)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_policy_lists_is_what_set_takes(capsys, turns, name):
    """Every value that is shown makes the policy that it is, and is allowed."""
    (policy,) = run_json(capsys, "policies", name)
    assert policy == json.loads(json.dumps(asdict(tk.policy(name))))
    assert cli.main(["policies", name]) == cli.DONE
    table, rules = capsys.readouterr().out.split("\n\n")
    assert rule_of(tk.policy(name), "on_drift") in rules
    lines = table.splitlines()[2:]
    names = {line.split()[0] for line in lines}
    assert names >= set(policy) - {"name"}
    forks = name in ("slime", "trl", "miles")
    for line in lines:
        choice, *values = re.split(r"[\s,]{2,}", line)
        for one in [x for x in values if re.fullmatch("[a-z_0-9]+", x)]:
            if choice != "fork_threshold" or forks:
                with suppress(PolicyError):  # choices that exclude each other
                    assert policy_of(f"{name} {choice}={one}").name == name


# --- what a stranger types


def test_the_command_alone_prints_help(capsys):
    assert cli.main([]) == cli.DONE
    out, err = capsys.readouterr()
    assert "Commands" in out
    assert "linearize" in out
    assert err == ""


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == cli.DONE
    assert capsys.readouterr().out == f"trajkit {version('trajkit')}\n"


class Bytes:
    """A standard stream of bytes, as `sys.stdin` and `sys.stdout` have them."""

    def __init__(self, content=b""):
        self.buffer, self.text = io.BytesIO(content), []

    def write(self, text):
        self.text.append(text)

    def flush(self):
        pass


def piped(monkeypatch, argv, content):
    out = Bytes()
    monkeypatch.setattr(sys, "stdin", Bytes(content))
    monkeypatch.setattr(sys, "stdout", out)
    return cli.main(argv), out.buffer.getvalue(), "".join(out.text)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "jsonl", "jsonl.gz"])
def test_a_dash_is_standard_input_and_output(tmp_path, monkeypatch, capsys, suffix):
    path = tmp_path / f"turns.{suffix}"
    turns = tk.from_records(CALLS)
    tk.write_turns(turns, path)
    argv = ["linearize", "-", "-o", "-", "--policy", "strict"]
    code, content, text = piped(monkeypatch, argv, path.read_bytes())
    assert (code, text) == (cli.DONE, "")
    rows = tk.read_rows(io.BytesIO(content), format="jsonl")
    assert rows == tk.linearize(turns, "strict")
    err = capsys.readouterr().err
    assert "written to standard output" in err
    assert "trajkit-" not in err
    code, small, _ = piped(monkeypatch, ["compact", str(path), "-o", "-"], b"")
    assert code == cli.DONE
    assert tk.read_turns(io.BytesIO(small), format="arrows") == tk.compact(turns)
    code, _, text = piped(monkeypatch, ["verify", "-", str(path)], content)
    assert (code, text.startswith("no violations\nwithout --policy, ")) == (
        cli.DONE,
        True,
    )


@pytest.mark.parametrize(
    ("argv", "content", "code", "said"),
    [
        (["drift", "-"], b"{]\n", cli.BAD_FILE, "standard input, line 1, column 2: "),
        (["drift", "-"], b"garbage", cli.BAD_FILE, "standard input begins with b'garb"),
        (["verify", "-", "-"], b"", cli.BAD_USAGE, "standard input is given twice"),
        (
            ["drift", "-"],
            b'{"input_ids":[],"loss_mask":[]}',
            1,
            "standard input: a tab",
        ),
        (["drift", "-"], b'{"input_ids":[', 1, "warning: standard input ends within"),
    ],
)
def test_errors_in_standard_input_name_it(
    monkeypatch, capsys, argv, content, code, said
):
    assert piped(monkeypatch, argv, content)[:2] == (code, b"")
    err = capsys.readouterr().err
    assert err.startswith(f"trajkit: {said}")
    assert "/" not in err


def test_completion_of_a_shell_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert cli.main(["--install-completion", "--shell", "bash"]) == cli.DONE
    texts = [path.read_text() for path in tmp_path.rglob("trajkit*")]
    assert any("--fork-threshold" in text for text in texts)


@pytest.mark.parametrize("earlier", [None, b"kept"])
def test_an_import_without_turns_says_which_flag_was_missing(tmp_path, capsys, earlier):
    log, out = tmp_path / "log.jsonl", tmp_path / "turns.parquet"
    said = [{"role": "user", "content": "x"}]
    answer = {"choices": [{"message": {"role": "assistant", "content": "y"}}]}
    log.write_text(json.dumps({"request": {"messages": said}, "response": answer}))
    if earlier is not None:
        out.write_bytes(earlier)
    report = tmp_path / "report.jsonl"
    argv = ["import", str(log), "-o", str(out), "--report", str(report)]
    assert cli.main(argv) == cli.BAD_DATA
    printed, err = capsys.readouterr()
    assert "no_prompt_ids" in printed
    assert "written to" not in printed
    assert "0 turns" in err
    assert "return_token_ids" in err
    assert "no_prompt_ids" in report.read_text()
    assert (out.read_bytes() if out.exists() else None) == earlier
