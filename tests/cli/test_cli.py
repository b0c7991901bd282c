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
from trajkit.cli.options import load_tokenizer, policy_of
from trajkit.cli.screen import Progress
from trajkit.cli.view import marked
from trajkit.errors import PolicyError
from trajkit.files.tables import iter_tables
from trajkit.policies import PRESETS, rule_of
from trajkit.tables import limits

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "shim/trajkit_shim/engines/embedded/tokenizer.json"


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


LINEARIZED = {
    "": {},
    "--policy slime --set fork_threshold=0": {
        "policy": tk.policy("slime", fork_threshold=0)
    },
    "--policy strict": {"policy": "strict"},
    "--policy per_call --max-row-tokens 6": {"policy": "per_call", "max_row_tokens": 6},
    "--reward 0.25": {"reward": 0.25},
}


@pytest.mark.parametrize("options", LINEARIZED)
def test_linearize_writes_what_the_function_gives(tmp_path, capsys, turns, options):
    rows, report = tmp_path / "rows.parquet", tmp_path / "report.parquet"
    argv = ["linearize", turns, "-o", str(rows), "--report", str(report)]
    printed = run_json(capsys, *argv, *options.split())
    expected, counts = linearized(tk.from_records(CALLS), **LINEARIZED[options])
    assert tk.read_rows(rows).equals(expected)
    assert pq.read_table(report).to_pylist() == counts.to_pylist()
    trained = sum(sum(mask) for mask in expected["loss_mask"].to_pylist())
    names = ("sessions", "turns", "rows", "tokens_sampled", "tokens_trained")
    assert [printed[x] for x in names] == [2, 4, expected.num_rows, 8, trained]


def test_linearize_tells_people_what_was_lost(tmp_path, capsys, turns):
    rows = str(tmp_path / "rows.jsonl")
    assert cli.main(["linearize", turns, "-o", rows, "--policy", "slime"]) == 0
    out, err = capsys.readouterr()
    assert "sessions 2, turns 4, rows 2\n" in out
    lines = [line.split() for line in out.splitlines()]
    assert "sampled 8 100.0 %".split() in lines
    assert "lost absorbed 3 37.5 %".split() in lines
    assert out.endswith(f"written to {rows}\n")
    assert err == ""


@pytest.mark.parametrize("piece", [1, limits.READ_TOKENS])
def test_drift_counts_by_region_and_cause(tmp_path, capsys, turns, monkeypatch, piece):
    monkeypatch.setattr(limits, "READ_TOKENS", piece)
    table = tmp_path / "drift.parquet"
    summary = run_json(capsys, "drift", turns, "-o", str(table))
    names = ("sessions", "turns", "turns_compared", "tokens_sampled")
    assert [summary[name] for name in names] == [2, 4, 2, 8]
    assert [[*group.values()] for group in summary["groups"]] == [
        ["last_reply", "tail_changed", 1, 1, 1],
        ["none", "clean", 1, 0, 0],
    ]
    assert pq.read_table(table)["size"].to_pylist() == [1, 0]
    summary = run_json(capsys, "drift", turns, "--policy", "per_call")
    assert (summary["turns_compared"], summary["groups"]) == (0, [])
    summary = run_json(capsys, "drift", turns, "--tokenizer", str(TOKENIZER.parent))
    (counts,) = summary["causes"]
    assert [counts[name] for name in ("turns", "path_tokens", "prompt_tokens")] == [
        1,
        1,
        2,
    ]
    assert [counts["cause"]] == [*summary["examples"]]


# code | command, with {turns} and the files of `refusing` | a part of the line on stderr
REFUSALS = r"""
2 | linearize {turns} -o r.parquet --policy slim | policy 'slim'
2 | flatten | Unknown command "flatten"
2 | linearize in | linearize needs a value for --out: see
2 | linearize in -o out --max-row-tokens 0 | Must be >= 1
2 | linearize in -o out --max-row-tokens x | unable to convert "x" into int
2 | linearize x -o y --polcy slime | Did you mean --policy?
2 | import x -o y --from opena | Did you mean "openai
2 | linearize x -o y z | z: not expected there; several files stand side by side
2 | plot swimlanes {turns} -o x.svg --policy trl | are for tokens, not for swimlanes
2 | simulat x | Did you mean "simulate"?
2 | export in --to slime -o out --max-length 9 | --max-length does nothing with --to slime
2 | linearize in -o out --reward 1 --sessions s.jsonl | --reward: not allowed
3 | drift absent.parquet | absent.parquet: No such file
3 | drift garbage.parquet | garbage.parquet
3 | show garbage.pt | garbage.pt: not a readable pickle
2 | view in --port 99999 | Must be <= 65535
2 | serve --out x --port -1 | Must be >= 0
3 | show {turns} --tokenizer Qwen/Qwen3-8B | Nothing is downloaded
2 | view in --follow -o x.html | --follow
2 | view in --print | --print
1 | view {turns} --session a,nobody -o x.html | no session 'nobody'
1 | show {turns} --session c | no session 'c'
2 | show {turns} --row 7 | --row 7: expected a row_index, 0 to 1
2 | linearize {turns} -o rows.xlsx | rows.xlsx
3 | linearize {turns} -o absent/rows.parquet | No such file or directory
3 | compact {turns} -o small.jsonl | JSON lines cannot store turns in delta form
3 | drift {turns} --tokenizer nowhere.json | nowhere.json: there is no such file or folder
3 | drift {turns} --tokenizer bad.json | not a tokenizer
1 | drift strange.parquet | session_id
1 | drift twice.parquet | session 'a', turn 0
2 | simulate in --set train_in=first | --set train_in=first needs a --policy before it
2 | drift in --policy trl --set own | --set 'own': expected CHOICE=VALUE
2 | verify {turns} {turns} --set train_in=first | needs a --policy before it
2 | drift in --policy trl --set fork_threshold=3 --set fork_threshold=2 | is given twice
2 | drift in SET trains_in=first | (did you mean 'train_in'?): expected one
2 | verify in in SET fork_threshold=x | fork_threshold='x'
2 | simulate in SET max_rows=0 | max_rows=0: expected an integer of 1
2 | drift in SET on_drift=absorb_any --set train_in=earliest | does not go with on_drift=
"""


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    # a wrong option is found before a file is read
    for name in ("in", "s.jsonl", "garbage.parquet", "garbage.pt"):
        (tmp_path / name).write_bytes(b"garbage")
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

    monkeypatch.setattr(cli, "entry_points", lambda group: [Entry()])
    assert cli.main(["hello", "you", "--loud"]) == 7
    assert capsys.readouterr().out == "hello you!\n"
    assert cli.main(["help", "hello"]) == cli.DONE
    assert "Shout." in capsys.readouterr().out


@pytest.mark.parametrize("command", ["tree", "help"])
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
                bar.count(31)
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
    table = tk.from_records(CALLS)
    for options, choices in (
        (["--pad", "8"], {"pad_to": 8}),
        (["--pack", "8"], {"pack_tokens": 8}),
    ):
        printed = run_json(capsys, "simulate", turns, *options)
        expected = tk.simulate(table, **choices).to_pylist()
        assert printed == {"cheapest": "faithful", "policies": expected}
    argv = ["simulate", turns, "--policy", "slime", "--policy", "skyrl"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == "turns 4, tokens sampled 8".split()
    assert lines[2][:6] == ["policy", "rows", "trained", "of", "sampled", "lost"]
    assert lines[4] == "slime 2 5 62.5 % 3 14 14 7".split()
    assert lines[-1] == "keeps everything at the lowest cost: skyrl".split()
    assert (
        "slime loses 3 tokens, lost to drift or a retry (absorbed). Its row continued with "
        "the next prompt's ids instead: drift, or a call that was tried again. "
        "lose nothing: skyrl same rule: rllm and verl as skyrl "
        "--policy art has a rule of its own, a choice of slime's "
    ) in " ".join(text.split())
    assert cli.main([*argv, "--wide", "--pack", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("packed  shared once  longest row  attended pairs")
    assert lines[4].split()[:7] == "slime 2 5 62.5 % 3 0".split()


def test_simulate_fits_100_columns(tmp_path, capsys):
    """With numbers of ten digits, and every preset."""
    calls = [
        call(name, [1] * 9000, [2, *range(900)], [QUESTION], ANSWER)
        for name in ("a", "b")
    ]
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(calls), path)
    options = ["--pack", "8192", "--policy", "slime", "--set", "fork_threshold=123456"]
    assert cli.main(["simulate", str(path), *options]) == cli.DONE
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "forward" in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_is_its_help(capsys, name):
    texts = []
    for argv in (["help", name], [name, "--help"]):
        assert cli.main(argv) == cli.DONE
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"Usage: trajkit {name}")
    # every option says what it is for
    assert not re.search(r"│[ *]+(-\S+ )+[A-Z]+ +(\[required\] +)?│", texts[0])
    path, first_line = cli.COMMANDS[name]
    module, _, function = path.partition(":")
    found = getattr(import_module(f"trajkit.cli.{module}"), function)
    assert found.__doc__.partition("\n")[0] == first_line


def test_what_commands_for_rows_write(tmp_path, monkeypatch, capsys, turns):
    monkeypatch.chdir(tmp_path)
    rows = tk.linearize(tk.from_records(CALLS))
    tk.write_rows(rows, "rows.parquet")
    argv = ["pack", "rows.parquet", "-o", "packs.parquet", "--max-tokens", "12"]
    found, expected = run_json(capsys, *argv), tk.pack(rows, 12)
    assert next(iter_tables("packs.parquet")).to_pylist() == expected.to_pylist()
    n_tokens = sum(expected["n_tokens"].to_pylist())
    counts = {"rows": rows.num_rows, "packs": expected.num_rows, "tokens": n_tokens}
    assert found.items() >= counts.items()
    assert cli.main([*argv[:-1], "1"]) == cli.BAD_DATA
    assert "max_tokens is 1" in capsys.readouterr().err
    argv = ["export", "rows.parquet", "--to", "sft", "-o", "out"]
    path = str(Path("out/rows.parquet"))
    exported = {"output": path, "rows": rows.num_rows, "to": "sft"}
    assert run_json(capsys, *argv) == exported
    expected = tk.analysis.why(tk.from_records(CALLS)).to_pylist()
    assert run_json(capsys, "why", turns) == {"rows": expected}


def test_verify_exits_with_1_on_a_violation(tmp_path, capsys, turns):
    rows = str(tmp_path / "rows.parquet")
    found = str(tmp_path / "found.jsonl")
    table = tk.linearize(tk.from_records(CALLS), "slime")
    tk.write_rows(table, rows)
    argv = ["verify", rows, turns, "--policy"]
    nothing = {"violations": [], "left_out": []}
    assert run_json(capsys, *argv, "slime") == nothing
    for options, said in (([], "without --policy, only what is true"), (["slime"], "")):
        assert cli.main([*argv[: 3 + len(options)], *options]) == cli.DONE
        assert capsys.readouterr().out.startswith(f"no violations\n{said}")
    argv += ["faithful"]
    assert cli.main([*argv, "-o", found]) == cli.BAD_DATA
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["not_trained", "1"] in lines
    written = [json.loads(line) for line in Path(found).read_text().splitlines()]
    violations = run_json(capsys, *argv, code=cli.BAD_DATA)["violations"]
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


# --- tokenizers


def test_tokens_of_an_example_are_apart_and_harmless():
    codec = Codec(load_tokenizer(TOKENIZER))
    tokens = codec.ids("print" + "ab" * 20 + "\x1b[2J")
    first = marked(codec, tokens, 1, 2)
    assert first.startswith(f"{codec.text(tokens[:1])}·[{codec.text(tokens[1:2])}]·")
    everything = marked(codec, tokens, 0, len(tokens))
    assert everything.endswith("|2|J]")
    assert "\\x1b" in everything
    assert "\x1b" not in everything
    assert marked(codec, tokens, 0, 0).startswith("[]·")


# --- the forms of turns and rows, choices of a policy, and what is known of sessions


def test_compact_and_expand_change_the_form_of_a_file(tmp_path, capsys, turns):
    small, back = str(tmp_path / "small.arrows"), str(tmp_path / "back.jsonl.gz")
    sizes = run_json(capsys, "compact", turns, "-o", small)
    before, after = map(os.path.getsize, (turns, small))
    assert [*sizes.values()] == [small, 4, before, after]
    assert tk.read_turns(small) == tk.compact(tk.read_turns(turns))
    assert run_json(capsys, "expand", small, "-o", back)["turns"] == 4
    assert tk.read_turns(back) == tk.read_turns(turns)


def test_rows_are_written_without_what_they_share(tmp_path, capsys, turns):
    out = str(tmp_path / "rows.parquet")
    run_json(capsys, "linearize", turns, "-o", out, "--dedup")
    assert "suffix_ids" in pq.read_schema(out).names
    assert tk.read_rows(out) == tk.linearize(tk.read_turns(turns))
    assert cli.main(["verify", out, turns]) == cli.DONE


SETS = {
    "slime fork_threshold=0 merge_rewrites=false": (0, False),
    "faithful train_in=earliest": ("earliest",),
    "segments max_rows=2 dispatch_tools=Task,spawn": (2, ("Task", "spawn")),
    "segments max_rows=none dispatch_tools=": (None, ()),
    "polar parent_by=none": ("none",),
}


@pytest.mark.parametrize("text", SETS)
def test_set_makes_a_choice(tmp_path, capsys, turns, text):
    name, *sets = text.split()
    choices = zip((one.partition("=")[0] for one in sets), SETS[text], strict=True)
    policy, rows = tk.policy(name, **dict(choices)), str(tmp_path / "rows.parquet")
    options = ["--policy", name, *(word for one in sets for word in ("--set", one))]
    said = run_json(capsys, "linearize", turns, "-o", rows, *options)["policy"]
    assert said == json.loads(json.dumps(asdict(policy)))
    assert tk.read_rows(rows) == tk.linearize(tk.read_turns(turns), policy)
    assert not run_json(capsys, "verify", rows, turns, *options)["violations"]
    assert run_json(capsys, "drift", turns, *options)["policy"] == said
    expected = tk.simulate(tk.read_turns(turns), [policy]).to_pylist()
    assert run_json(capsys, "simulate", turns, *options)["policies"] == expected


SESSIONS = [
    {"session_id": "b", "reward": 1.0, "group_id": "g"},
    {"session_id": "a", "reward": None, "group_id": "g", "error": "timed out"},
]


def test_sessions_say_rewards_groups_and_errors(tmp_path, capsys, turns):
    file, rows = str(tmp_path / "known.jsonl"), str(tmp_path / "rows.parquet")
    known = pa.Table.from_pylist(SESSIONS, tk.schema.SESSIONS)
    Path(file).write_text("".join(f"{json.dumps(one)}\n" for one in SESSIONS))
    options = ["--policy", "slime", "--sessions", file]
    said = run_json(capsys, "linearize", turns, "-o", rows, *options)
    assert (said["tokens_trained"], said["lost_untrainable"]) == (4, 4)
    expected = tk.linearize(tk.read_turns(turns), "slime", sessions=known)
    assert expected["reward"].to_pylist() == [1.0]
    assert tk.read_rows(rows) == expected
    (line,) = run_json(capsys, "simulate", turns, *options)["policies"]
    assert line["lost_untrainable"] == 4
    assert not run_json(capsys, "verify", rows, turns, *options)["violations"]
    argv = ["verify", rows, turns, *options[:2], "--reward", "2"]
    assert cli.main(argv) == cli.BAD_DATA
    assert ["reward", "1"] in [x.split() for x in capsys.readouterr().out.splitlines()]


def test_policies_are_listed(capsys):
    assert [one["name"] for one in run_json(capsys, "policies")] == list(PRESETS)
    assert cli.main(["policies"]) == cli.DONE
    lines = capsys.readouterr().out.splitlines()
    for name in ("skyrl", "verl"):
        (line,) = (line for line in lines if line.startswith(name))
        assert line.split("  ")[-1].strip() == "parent_by=previous, train_aborted=true"
    assert any("keep_untrained=true" in line for line in lines)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_policy_lists_is_what_set_takes(capsys, turns, name):
    (policy,) = run_json(capsys, "policies", name)
    assert policy == json.loads(json.dumps(asdict(tk.policy(name))))
    assert cli.main(["policies", name]) == cli.DONE
    table, rules = capsys.readouterr().out.split("\n\n")
    assert rule_of(tk.policy(name), "on_drift") in rules
    lines = table.splitlines()[2:]
    assert {line.split()[0] for line in lines} >= set(policy) - {"name"}
    forks = name in ("slime", "trl", "miles")
    for line in lines:
        choice, *values = re.split(r"[\s,]{2,}", line)
        for one in [x for x in values if re.fullmatch("[a-z_0-9]+", x)]:
            if choice != "fork_threshold" or forks:
                with suppress(PolicyError):  # choices that exclude each other
                    assert policy_of(f"{name} {choice}={one}").name == name


# --- what a stranger types


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["Commands", "linearize"]),
        (["help"], ["Say whether a trainer's mask trains what was sampled"]),
        (["--version"], [f"trajkit {version('trajkit')}\n"]),
    ],
)
def test_the_command_alone_prints_help_or_its_version(capsys, argv, words):
    assert cli.main(argv) == cli.DONE
    out, err = capsys.readouterr()
    assert all(word in out for word in words)
    assert err == ""


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


@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz"])
def test_a_dash_is_standard_input_and_output(tmp_path, monkeypatch, capsys, suffix):
    path = tmp_path / f"turns.{suffix}"
    turns = tk.from_records(CALLS)
    tk.write_turns(turns, path)
    argv = ["linearize", "-", "-o", "-", "--policy", "strict"]
    code, content, text = piped(monkeypatch, argv, path.read_bytes())
    assert (code, text) == (cli.DONE, "")
    rows = tk.read_rows(io.BytesIO(content), format="jsonl")
    assert rows == tk.linearize(turns, "strict")
    assert capsys.readouterr().err.endswith("\nwritten to standard output\n")
    code, small, _ = piped(monkeypatch, ["compact", str(path), "-o", "-"], b"")
    assert code == cli.DONE
    assert tk.read_turns(io.BytesIO(small), format="arrows") == tk.compact(turns)
    code, _, text = piped(monkeypatch, ["verify", "-", str(path)], content)
    assert code == cli.DONE
    assert text.startswith("no violations\nwithout --policy, ")


# command | standard input | code | the line on stderr
STANDARD_INPUTS = r"""
drift - | {]NL | 3 | standard input, line 1, column 2
drift - | garbage | 3 | standard input begins with b'garb
verify - - | | 2 | standard input is given twice
drift - | {"input_ids":[],"loss_mask":[]} | 1 | standard input: a tab
drift - | {"input_ids":[ | 1 | warning: standard input ends within
"""


@pytest.mark.parametrize("line", STANDARD_INPUTS.strip("\n").split("\n"))
def test_errors_in_standard_input_name_it(monkeypatch, capsys, line):
    command, content, code, said = (part.strip() for part in line.split("|"))
    content = content.replace("NL", "\n").encode()
    given = piped(monkeypatch, command.split(), content)
    assert given[:2] == (int(code), b"")
    err = capsys.readouterr().err
    assert err.startswith(f"trajkit: {said}")
    assert "/" not in err


def test_completion_of_a_shell_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert cli.main(["--install-completion", "--shell", "bash"]) == cli.DONE
    texts = [path.read_text() for path in tmp_path.rglob("trajkit*")]
    assert any("--max-row-tokens" in text for text in texts)


def test_an_import_without_turns_says_which_flag_was_missing(tmp_path, capsys):
    log, out, report = (
        tmp_path / name for name in ("log.jsonl", "t.parquet", "r.jsonl")
    )
    answer = {"choices": [{"message": {"role": "assistant", "content": "y"}}]}
    request = {"messages": [QUESTION]}
    log.write_text(json.dumps({"request": request, "response": answer}))
    for earlier in (None, b"kept"):
        if earlier:
            out.write_bytes(earlier)
        argv = ["import", str(log), "-o", str(out), "--report", str(report)]
        assert cli.main(argv) == cli.BAD_DATA
        printed, err = capsys.readouterr()
        assert "no_prompt_ids" in printed
        assert "written to" not in printed
        assert "0 turns" in err
        assert "return_token_ids" in err
        assert "no_prompt_ids" in report.read_text()
        assert (out.read_bytes() if out.exists() else None) == earlier
