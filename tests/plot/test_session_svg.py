"""A session's picture shows what its tables say."""

from xml.etree import ElementTree

import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.tables import linearized, turns_table
from trajkit.cli import main
from trajkit.plot import forest

SVG = "{http://www.w3.org/2000/svg}"


ASK = {"role": "user", "content": "go on"}
REPLY = {"role": "assistant", "content": "done"}


def call(session_id, prompt, output, n_before=0, **more):
    return {
        "session_id": session_id,
        "prompt_ids": prompt,
        "output_ids": output,
        "prompt_messages": [ASK, *[REPLY, ASK] * n_before],
        "response_message": REPLY,
        **more,
    }


DRIFTING = tk.from_records(
    [
        call("a", [1, 2], [3, 4]),
        call("a", [1, 2, 3, 5, 6], [7], 1),
        call("a", [1, 2, 3, 5, 6, 7, 8], [9], 2, trainable=False),
        call("<&>", [1], [2]),
    ]
)


def shapes(picture, kind):
    """x and width of the bars of a kind; without columns of policies and the legend."""
    return [
        (float(bar.get("x")), float(bar.get("width")))
        for bar in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        if bar.get("class") == kind
        and 104 <= float(bar.get("x")) <= 624
        and float(bar.get("y")) < 92 + 3 * 24
    ]


def texts(picture):
    return ["".join(e.itertext()) for e in ElementTree.fromstring(picture).iter()]


def test_bars_begin_where_a_call_leaves_its_parent():
    picture = forest(DRIFTING, "a", policies=())
    # tokens 1 to 8 are 520 pixels; the axis begins at nine tenths of the first prompt
    pixels = 520 / 7
    at = [104 + pixels * (start - 1) for start in (1, 3, 6)]
    assert [x for x, _ in shapes(picture, "context")] == pytest.approx(at, abs=0.1)
    assert shapes(picture, "drift") == [pytest.approx((at[1], pixels), abs=0.1)]


@pytest.mark.parametrize(
    ("policy", "share"), [("faithful", "75"), ("trl", "50"), ("per_call", "75")]
)
def test_columns_show_what_a_policy_trains(policy, share):
    picture = forest(DRIFTING, "a", policies=[policy])
    rows, report = linearized(DRIFTING.slice(0, 3), policy)
    trained = report["tokens_trained"][0].as_py()
    assert share == f"{100 * trained / 4:.0f}"
    assert share in texts(picture)
    assert str(rows.num_rows) in texts(picture)
    lanes = sum(width for _, width in shapes(picture, "trained"))
    assert lanes / (520 / 7) == pytest.approx(trained, abs=0.01)


def test_names_are_escaped():
    picture = forest(DRIFTING, "<&>")
    assert "Session &lt;&amp;&gt;" in picture
    assert "Session <&>" in texts(picture)
    control = tk.from_records([call("a\x00b\x1b", [1], [2])])
    assert "Session a\ufffdb\ufffd" in texts(forest(control))


def test_every_generated_session_has_a_picture():
    turns = turns_table(generated_runs(12, 5))
    for session_id in turns["session_id"].unique().to_pylist():
        picture = forest(turns, session_id)
        ElementTree.fromstring(picture)
        assert picture == forest(tk.compact(turns), session_id)


def test_the_command_draws_the_longest_session(tmp_path, capsys):
    source, out = tmp_path / "turns.parquet", tmp_path / "a.svg"
    tk.write_turns(DRIFTING, source)
    assert main(["plot", "forest", str(source), "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == forest(DRIFTING, "a")
    assert main(["plot", "forest", str(source), "-o", str(out), "--session", "b"]) == 1
    assert "no session 'b'" in capsys.readouterr().err
