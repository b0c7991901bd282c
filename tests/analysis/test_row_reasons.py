"""Each row has one sentence that says why it begins where it does; calls form a tree."""

import pyarrow as pa
import pytest
from hypothesis import given

import trajkit as tk
from tests.made_tables import by_session, policy_of, replaced, turns_table
from tests.strategies import policies, runs
from trajkit.cli import main
from trajkit.schema import EMPTY_KINDS
from trajkit.view.tables import ViewTables

# turn 1 repeats all of turn 0's path, turn 2 leaves turn 1's reply, turn 3 branches off 0
DRIFTING = [
    {"prompt_ids": [1, 2], "output_ids": [3, 4, 5]},
    {"prompt_ids": [1, 2, 3, 4, 5, 6], "output_ids": [7, 8, 9, 10]},
    {"prompt_ids": [1, 2, 3, 4, 5, 6, 7, 11, 15], "output_ids": [12]},
    {"prompt_ids": [1, 2, 3, 4, 5, 13], "output_ids": [14]},
]


def drifting():
    return tk.from_records([{"session_id": "a", **call} for call in DRIFTING])


FIRST = "row 0 opens at turn 0: it is the session's first turn. It trains "


@pytest.mark.parametrize(
    ("policy", "opened_by", "sentences"),
    [
        pytest.param(
            tk.policy("slime", parent_by="previous"),
            ["no_parent", "drift"],
            [
                FIRST + "4 tokens; 4 tokens lost to drift or a retry.",
                "row 1 opens at turn 3: its prompt differs from turn 2's prompt at token "
                "5, before any reply (diverged; 2 tokens sampled after that). It trains 1 "
                "token.",
            ],
            id="drift in a prompt",
        ),
        pytest.param(
            "faithful",
            ["no_parent", "drift", "branch"],
            [
                FIRST + "7 tokens.",
                "row 1 opens at turn 2: its prompt differs from turn 1's reply at token 1 "
                "of 4 (tail changed; 3 tokens sampled after that). It trains 1 token.",
                "row 2 opens at turn 3: it branches off turn 0, which another row "
                "continues. It trains 1 token.",
            ],
            id="a branch",
        ),
    ],
)
def test_sentences_name_the_turn_the_token_and_the_reason(policy, opened_by, sentences):
    table = tk.analysis.why(drifting(), policy)
    assert table["sentence"].to_pylist() == sentences
    assert table["opened_by"].to_pylist() == opened_by


@given(runs(), policies)
def test_every_row_has_a_sentence_and_its_own_counts(turns, policy):
    table = turns_table(turns)
    chosen = policy_of(policy)
    rows = tk.linearize(table, chosen)
    lines = tk.analysis.why(table, chosen).to_pylist()
    for row, line in zip(rows.to_pylist(), lines, strict=True):
        assert (row["session_id"], row["row_index"]) == (
            line["session_id"],
            line["row_index"],
        )
        assert line["tokens_trained"] == sum(row["loss_mask"])
        lost = [s for s in row["spans"] if s["kind"] in EMPTY_KINDS]
        assert line["tokens_lost"] == sum(
            span["output_stop"] - span["output_start"] for span in lost
        )
        assert line["first_turn"] in row["turns"]
        assert (line["parent"] is None) == (line["opened_by"] == "no_parent")


@given(runs())
def test_a_tree_has_a_line_per_call_below_its_parent(turns):
    table = turns_table(turns)
    links = tk.link(table).to_pylist()
    for name, calls in by_session(turns).items():
        lines = tk.analysis.call_tree(table, name)
        assert len(lines) == len(calls)
        order = [int(line.split("turn ")[1].split(":")[0]) for line in lines]
        assert sorted(order) == [call["turn_index"] for call in calls]
        for link in links:
            if link["session_id"] == name and link["parent"] is not None:
                assert order.index(link["parent"]) < order.index(link["turn_index"])


def test_a_tree_indents_branches_and_marks_drift():
    assert tk.analysis.call_tree(drifting(), "a") == [
        "turn 0: prompt 2, output 3",
        "├─ turn 1: prompt 6, output 4",
        "│  turn 2: prompt 9, output 1, drift at token 7 (tail changed, "
        "3 sampled tokens after it)",
        "└─ turn 3: prompt 6, output 1, rollback",
    ]


def test_a_long_session_is_drawn_without_recursion():
    ids = list(range(1, 1201))
    calls = [
        {"session_id": "a", "prompt_ids": ids[:n], "output_ids": [ids[n]]}
        for n in range(1, 1199)
    ]
    lines = tk.analysis.call_tree(tk.from_records(calls), "a", "strict")
    assert lines[-1] == "turn 1197: prompt 1,198, output 1"


def test_the_commands_escape_names(tmp_path, capsys):
    path = tmp_path / "turns.arrows"
    records = [{"session_id": "\x1b[2Ja\u202e", **call} for call in DRIFTING]
    tk.write_turns(tk.from_records(records), path)
    for command in ("why", "tree"):
        assert main([command, str(path), "--policy", "strict"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("session \\x1b[2Ja\\u202e\n")


def test_a_session_with_an_error_opens_no_row(tmp_path, capsys):
    """Rows and their sentences are those of the same sessions."""
    turns = tk.from_records(
        [
            {"session_id": name, "prompt_ids": [1], "output_ids": [2] * n}
            for n, name in enumerate("ab", 1)
        ]
    )
    known = pa.table({"session_id": ["a", "b"], "error": ["x", None]})
    reasons = tk.analysis.why(turns, sessions=known)
    assert reasons["session_id"].to_pylist() == ["b"]
    turns_file, facts = str(tmp_path / "turns.parquet"), str(tmp_path / "facts.parquet")
    tk.write_turns(turns, turns_file)
    tk.write_sessions(known, facts)
    for command in (["why"], ["show"]):
        assert main([*command, turns_file, "--sessions", facts]) == 0
        assert "session a, row" not in (out := capsys.readouterr().out)
        assert "session b" in out
    page = str(tmp_path / "page.html")
    assert main(["view", turns_file, "--sessions", facts, "-o", page]) == 0
    made = ViewTables(turns, [tk.policy("faithful")], known)._table("rows", 0)
    assert made.select("session_id", "trained").rows() == [("b", 2)]


def test_rows_say_where_they_leave_an_earlier_row():
    calls = [
        {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4, 5]},
        {"session_id": "a", "prompt_ids": [1, 2, 3, 4, 9], "output_ids": [7]},
        {"session_id": "a", "prompt_ids": [1, 2, 8], "output_ids": [7]},
        {"session_id": "a", "prompt_ids": [6], "output_ids": [7]},
    ]
    table = tk.analysis.why(tk.linearize(tk.from_records(calls)))
    assert table["sentence"].to_pylist() == [
        "row 0: it shares no token with an earlier row. It trains 3 tokens of 5.",
        "row 1: it shares its first 4 tokens with row 0. It trains 1 token of 6.",
        "row 2: it shares its first 2 tokens with row 0. It trains 1 token of 4.",
        "row 3: it shares no token with an earlier row. It trains 1 token of 2.",
    ]
    opened_by = ["no_parent", "branch", "branch", "no_parent"]
    assert table["opened_by"].to_pylist() == opened_by


def test_a_session_whose_id_is_a_number():
    table = replaced(drifting(), "session_id", pa.array([7] * len(drifting())))
    assert tk.analysis.call_tree(table, "7") == tk.analysis.call_tree(drifting(), "a")
    assert len(tk.analysis.why(table)) == len(tk.analysis.why(drifting()))
