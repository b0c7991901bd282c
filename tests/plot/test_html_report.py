"""The report is one safe page, with the numbers of the tables."""

import base64
import re
from html.parser import HTMLParser

import pyarrow as pa
import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.tables import turns_table
from trajkit.analysis.colors import COLORS
from trajkit.analysis.words import LOSS_WORDS, MENDS
from trajkit.cli import main
from trajkit.schema import CAUSES, LOSSES, OUTPUT_KINDS, SPAN_KINDS, TEXT_CAUSES

RUN = turns_table(generated_runs(12, 5))
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=y>\x1b\u202e'&"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """The elements of a page; every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.tables = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            # titles of bars are no text of the cell
            if "title" not in self.open:
                self.tables[-1][-1][-1] += data

    def table(self, *head):
        """The lines of the table with these first columns."""
        (found,) = (t for t in self.tables if tuple(t[0][: len(head)]) == head)
        return found[1:]


def call(session_id, prompt, output, **more):
    return {
        "session_id": session_id,
        "prompt_ids": prompt,
        "output_ids": output,
        **more,
    }


def number(n):
    return f"{n:,}"


@pytest.mark.parametrize("policy", ["faithful", "slime"])
def test_policies_have_the_counts_of_simulate(policy):
    page = Page(tk.plot.report(RUN, policy))
    simulation = tk.simulate(RUN).to_pylist()
    assert page.table("policy") == [
        [
            line["policy"],
            "",
            number(line["tokens_trained"]),
            f"{100 * line['tokens_trained'] / line['tokens_sampled']:.1f} %",
            number(line["rows"]),
            number(line["tokens_forward"]),
            number(line["tokens_forward_shared"]),
        ]
        for line in simulation
    ]
    reasons = [t[1:] for t in page.tables if t[0][0] == "reason"]
    expected = [
        [
            [loss.replace("_", " "), number(line[f"lost_{loss}"]), LOSS_WORDS[loss][1]]
            for loss in LOSSES
            if line[f"lost_{loss}"]
        ]
        for line in simulation
        if line["tokens_lost"]
    ]
    assert reasons == expected
    assert len(expected) > 3


def test_lost_tokens_name_their_turn_and_the_turn_that_drifts():
    turns = tk.from_records([call("a", [1], [2, 3]), call("a", [1, 2, 9], [4])])
    page = Page(tk.plot.report(turns))
    tables = [t[1:] for t in page.tables if t[0][:2] == ["session", "turn"]]
    assert ["a", "0", "1", "absorbed", "turn 1"] in [line for t in tables for line in t]


def test_drift_has_its_counts_and_what_to_change():
    text = tk.plot.report(RUN)
    drift = tk.classify_drift(RUN, tk.link(RUN)).to_pylist()
    lines = Page(text).table("cause", "turns")
    for cause, n, tokens, what, _, example in lines:
        own = [one for one in drift if one["cause"] == cause.replace(" ", "_")]
        assert n == number(len(own))
        assert tokens == number(sum(one["tokens_after_drift"] for one in own))
        assert what == MENDS[cause.replace(" ", "_")][0]
        assert example.startswith(f"session {own[0]['session_id']}, turn ")
    assert sum(int(line[1]) for line in lines) == sum(1 for one in drift if one["size"])
    (picture,) = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)
    at_stake = {}
    for one in drift:
        at_stake.setdefault(one["session_id"], 0)
        at_stake[one["session_id"]] += one["tokens_after_drift"]
    worst = max(at_stake, key=at_stake.__getitem__)
    assert base64.b64decode(picture).decode() == tk.plot.forest(RUN, worst)


class Letters:
    """Ids are code points."""

    def encode(self, text, add_special_tokens):
        return [ord(char) for char in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def test_a_tokenizer_names_causes_and_shows_texts():
    path, prompt = ([ord(char) for char in text] for text in ("a<b>  c", "a<b> c"))
    turns = tk.from_records([call("s", [1], path), call("s", [1, *prompt], [2])])
    (line,) = Page(tk.plot.report(turns, tokenizer=Letters())).table("cause")
    assert line[0] == "white space"
    assert line[5] == "session s, turn 1: ' ' (1 token) came back as '' (0 tokens)"


def test_every_kind_has_words_and_a_color():
    assert {*MENDS} == {*CAUSES[1:], *TEXT_CAUSES}
    assert [*LOSS_WORDS] == [*LOSSES]
    assert {*SPAN_KINDS, *OUTPUT_KINDS} <= {*COLORS}


def test_both_forms_of_turns_have_the_same_report():
    assert tk.plot.report(tk.compact(RUN)) == tk.plot.report(RUN)


def test_hostile_text_is_text():
    calls = [
        call(
            HOSTILE,
            [1, 2],
            [3, 4],
            model=HOSTILE,
            harness=["a", "list"],
            weight_versions=[{"version": HOSTILE, "start": 0, "stop": 2}],
        ),
        call(HOSTILE, [1, 2, 3, 9], [5], model=None),
    ]
    sessions = pa.table(
        {"session_id": [HOSTILE], "reward": [0.5], "group_id": [HOSTILE]}
    )
    turns = tk.from_records(calls)
    text = tk.plot.report(turns, sessions=sessions)
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert "script" not in tags
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    assert all(
        found["src"].startswith("data:image/svg+xml;base64,")
        for tag, found in page.tags
        if tag == "img"
    )
    assert not {"\x1b", "\u202e"} & {*text}
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    (group,) = page.table("group")
    assert group[0] == shown
    (version,) = page.table("version, in order of appearance")
    assert version == [shown, "2", "1"]
    assert [found["content"] for _, found in page.tags if "http-equiv" in found] == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    ]
    # nothing is loaded from anywhere
    assert not re.search(r"""(?:href|url|@import|https?:)""", text)


def test_groups_without_variance_come_first():
    turns = tk.from_records([call(name, [1], [2]) for name in "abcde"])
    sessions = pa.table(
        {
            "session_id": [*"abcde"],
            "reward": [0.0, 1.0, 2.0, 2.0, None],
            "group_id": ["g", "g", "h", "h", "h"],
        }
    )
    text = tk.plot.report(turns, sessions=sessions)
    assert Page(text).table("group") == [
        ["h", "3", "2", "2", "2", "2", "no variance: advantages are 0"],
        ["g", "2", "2", "0.5", "0", "1", ""],
    ]
    assert "1 of 2 groups have no variance in reward." in text
    assert "1 session without one" in text


def test_violations_of_given_rows_are_shown():
    rows = tk.linearize(RUN)
    column = rows.schema.get_field_index("shared_length")
    wrong = pa.array([n + 1 for n in rows["shared_length"].to_pylist()], pa.int32())
    faulty = rows.set_column(column, rows.schema.field(column), wrong)
    found = tk.verify(faulty, RUN, "faithful")
    text = tk.plot.report(RUN, rows=faulty)
    page = Page(text)
    assert page.table("rule") == [["shared_length", str(found.num_rows)]]
    lines = page.table("session", "row")
    assert [line[5] for line in lines] == found["detail"].to_pylist()[:20]
    assert f"<li>{found.num_rows} violations in the rows.</li>" in text
    assert "The rows break no rule." in tk.plot.report(RUN)


def test_steps_have_averages():
    turns = tk.from_records(
        [call(name, [1], [2], step=step) for name, step in (("a", 3), ("b", 4))]
    )
    lines = Page(tk.plot.report(turns)).table("step")
    assert [line[:4] for line in lines] == [["3", "1", "", "1"], ["4", "1", "", "1"]]


def test_long_tables_end_with_a_count():
    turns = tk.from_records([call(f"s{k}", [1], [2]) for k in range(50)])
    names = turns["session_id"].to_pylist()
    sessions = pa.table({"session_id": names, "reward": [1.0] * 50, "group_id": names})
    text = tk.plot.report(turns, sessions=sessions)
    assert len(Page(text).table("group")) == 20
    assert "and 30 more" in text


@pytest.mark.parametrize("n", [0, 1])
def test_runs_with_little_in_them_have_a_report(n):
    turns = tk.from_records([call("a", [1], [2])]).slice(0, n)
    text = tk.plot.report(turns)
    Page(text)
    assert (
        f"<li>{n} turn{'s' * (n != 1)} of {n} session{'s' * (n != 1)} sampled" in text
    )
    for missing in (
        "No prompt drifts",
        "No session has a reward",
        "no weight versions",
        "no column <code>step</code>",
        "the turns have none",
    ):
        assert missing in text


def test_the_command_takes_a_folder_and_rows(tmp_path, capsys):
    run, rows, page = tmp_path / "run", tmp_path / "rows.parquet", tmp_path / "a.html"
    run.mkdir()
    tk.write_turns(RUN, run / "turns.parquet")
    names = RUN["session_id"].unique().to_pylist()
    sessions = pa.table({"session_id": names, "reward": [0.125] * len(names)})
    tk.write_sessions(sessions, run / "sessions.parquet")
    tk.write_rows(tk.linearize(RUN, "slime"), rows)
    arguments = ["report", str(run), "-o", str(page), "--policy", "slime"]
    assert main(arguments) == 0
    assert page.read_text("utf-8") == tk.plot.report(RUN, "slime", sessions=sessions)
    assert main([*arguments, "--rows", str(rows)]) == 0
    assert "in the given rows" in page.read_text("utf-8")
    other = tmp_path / "other.parquet"
    tk.write_sessions(sessions.set_column(1, "reward", [[0.75] * len(names)]), other)
    assert main([*arguments, "--sessions", str(other)]) == 0
    assert "mean 0.75" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forest", "-o", "a.png"], "a.png: forest is written as .svg"),
        (["trace", "-o", "a.svg"], "a.svg: trace is written as .json"),
        (["run", "-o", "a.jpg"], "run is written as .svg or .png or .pdf"),
        (
            ["drift", "-o", "a.svg", "--policy", "trl", "--policy", "nemo"],
            "drift takes one",
        ),
        (["pie", "-o", "a.svg"], "invalid choice"),
    ],
)
def test_wrong_usage_is_named(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "turns.parquet"
    tk.write_turns(RUN, source)
    kind, *options = arguments
    try:
        code = main(["plot", kind, str(source), *options])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
