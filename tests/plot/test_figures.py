"""Figures show the numbers of the tables that they are drawn from."""

import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.tables import turns_table
from trajkit.analysis.colors import OUTPUTS, REGIONS, ROLES, TIMES
from trajkit.cli import main
from trajkit.plot.turn_tokens import session_tokens
from trajkit.schema import DRIFT, LOSSES, SIMULATION

colors = pytest.importorskip("matplotlib.colors")
from trajkit.plot.figures import save  # noqa: E402

RUN = turns_table(generated_runs(12, 5))
HOSTILE = "$\\frac{$ <script>\x1b\u202e&"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def call(session_id, prompt, output, **more):
    return {
        "session_id": session_id,
        "prompt_ids": prompt,
        "output_ids": output,
        "started_at": BEGAN + timedelta(seconds=more.pop("start", 0)),
        "ended_at": BEGAN + timedelta(seconds=more.pop("stop", 1)),
        **more,
    }


SMALL = tk.from_records(
    [
        call(HOSTILE, [1, 2], [3, 4]),
        call(HOSTILE, [1, 2, 3, 5, 6], [7], start=2, stop=4),
    ]
)


def bars(ax, color):
    """x, y, width and height of the bars of a color."""
    return [
        (bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height())
        for bar in ax.patches
        if colors.same_color(bar.get_facecolor(), color)
    ]


def lengths(ax, color, n):
    """Lengths of the horizontal bars of a color, by row."""
    found = [0] * n
    for _, y, width, height in bars(ax, color):
        found[round(y + height / 2)] = width
    return found


def assert_stacked(ax, axis, size):
    """Bars of a stack begin where others end."""
    stacks = {}
    for bar in ax.patches:
        place = bar.get_xy(), (bar.get_width(), bar.get_height())
        start, length = (of[axis] for of in place)
        across = place[0][1 - axis] + place[1][1 - axis] / 2
        if length:
            stacks.setdefault(round(across), []).append((start, start + length))
    assert max(map(len, stacks.values())) >= size
    for parts in stacks.values():
        parts.sort()
        assert parts[0][0] == 0
        for (_, end), (start, _) in pairwise(parts):
            assert start == pytest.approx(end)


def texts(figure):
    return [
        text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))
    ]


def drawn(figure, tmp_path):
    """The texts of the SVG file."""
    path = tmp_path / "a.svg"
    save(figure, path, "svg")
    root = ElementTree.parse(path).getroot()
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    return [
        "".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")
    ]


def test_bars_of_policies_are_the_counts_of_simulate():
    table = tk.simulate(RUN, max_row_tokens=9)
    kept, cost = tk.plot.policies(table).axes
    n = table.num_rows
    sampled = table["tokens_sampled"][0].as_py()
    names = {"trained": "tokens_trained"} | {loss: f"lost_{loss}" for loss in LOSSES}
    shown = set()
    for kind, color in OUTPUTS.items():
        counts = table[names[kind]].to_pylist()[::-1]
        if any(counts):
            shown.add(kind)
            shares = [100 * count / sampled for count in counts]
            assert lengths(kept, color, n) == pytest.approx(shares)
    assert len(shown) > 5
    assert_stacked(kept, 0, 3)
    assert {text.replace(" ", "_") for text in texts(kept.figure)} >= shown
    assert [label.get_text() for label in kept.get_yticklabels()] == table[
        "policy"
    ].to_pylist()[::-1]
    assert lengths(cost, "#c8ced6", n) == table["tokens_forward"].to_pylist()[::-1]
    assert (
        lengths(cost, "#57606a", n) == table["tokens_forward_shared"].to_pylist()[::-1]
    )
    assert {f"{rows:,} rows" for rows in table["rows"].to_pylist()} <= {*texts(cost)}


def test_bars_of_drift_are_the_counts_of_its_table():
    table = tk.classify_drift(RUN, tk.link(RUN))
    drifted = [line for line in table.to_pylist() if line["size"]]
    figure = tk.plot.drift(table)
    turns, at_stake = figure.axes
    causes = [label.get_text().replace(" ", "_") for label in turns.get_yticklabels()]
    assert set(causes) == {line["cause"] for line in drifted}
    n_turns, n_tokens = Counter(), Counter()
    for line in drifted:
        n_turns[line["cause"], line["region"]] += 1
        n_tokens[line["cause"], line["region"]] += line["tokens_after_drift"]
    for ax, counts in ((turns, n_turns), (at_stake, n_tokens)):
        for region, color in REGIONS.items():
            expected = [counts[cause, region] for cause in causes]
            assert lengths(ax, color, len(causes)) == expected
    assert (
        f"Drift: {len(drifted)} of {table.num_rows} turns that continue another"
        in texts(figure)
    )


@pytest.mark.parametrize("policy", ["faithful", "slime", "nemo", "miles"])
def test_bars_of_turns_are_the_counts_of_the_report(policy):
    _, report = tk.linearize(RUN, policy, report=True)
    for line in report.to_pylist()[:4]:
        name = line["session_id"]
        figure = tk.plot.tokens(RUN, policy, name)
        prompts, outputs = figure.axes
        for kind, color in OUTPUTS.items():
            n = line["tokens_trained" if kind == "trained" else f"lost_{kind}"]
            assert sum(height for *_, height in bars(outputs, color)) == n
        session = RUN.filter(pa.compute.equal(RUN["session_id"], name))
        delta = session_tokens(tk.compact(RUN), policy, name)
        full = session_tokens(RUN, policy, name)
        for counted in ("roles", "kinds"):
            found, expected = getattr(delta, counted), getattr(full, counted)
            assert all((found[key] == expected[key]).all() for key in expected)
        n_prompt = [len(ids) for ids in session["prompt_ids"].to_pylist()]
        heights = np.zeros(len(n_prompt))
        for color in ROLES.values():
            for x, _, width, height in bars(prompts, color):
                heights[round(x + width / 2)] += height
        assert heights.tolist() == n_prompt
        assert_stacked(prompts, 1, 1)
        assert any(
            f"{line['tokens_trained']:,} of {line['tokens_sampled']:,}" in text
            for text in texts(figure)
        )


def test_a_token_that_is_trained_twice_is_drawn_once():
    turns = tk.from_records(
        [
            call("a", [1], [2, 3]),
            call("a", [1, 2, 3, 4], [5]),
            call("a", [1, 2, 3, 6], [7]),
        ]
    )
    assert tk.analysis.output_spans(turns, "nemo").num_rows == 4
    found = session_tokens(turns, "nemo", None)
    assert found.kinds["trained"].tolist() == [2, 1, 1]


def test_roles_come_from_attribution_and_else_from_the_path():
    asks = [{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}]
    reply = {"role": "assistant", "content": "r"}
    more = [*asks, reply, {"role": "tool", "content": "t"}]
    turns = tk.from_records(
        [
            {
                "session_id": "a",
                "prompt_ids": [1, 2, 3],
                "output_ids": [4, 5],
                "prompt_messages": asks,
                "response_message": reply,
                "prompt_message_index": [0, 1, -1],
            },
            {
                "session_id": "a",
                "prompt_ids": [1, 2, 3, 4, 5, 6, 7, 8],
                "output_ids": [9],
                "prompt_messages": more,
                "prompt_message_index": [-1] * 5 + [3, 3, 9],
            },
        ]
    )
    assert_stacked(tk.plot.tokens(turns).axes[0], 1, 5)
    found = session_tokens(turns, "faithful", None).roles
    assert {role: counts.tolist() for role, counts in found.items()} == {
        "system": [1, 1],
        "user": [1, 1],
        "assistant": [0, 2],
        "tool": [0, 2],
        "other": [1, 2],
    }


def test_histograms_count_every_session_and_turn():
    _, report = tk.linearize(RUN, report=True)
    figure = tk.plot.run(RUN, report)
    for ax in figure.axes[:3]:
        (stairs,) = ax.patches
        counts, edges, _ = stairs.get_data()
        expected = report.num_rows if ax.get_ylabel() == "sessions" else RUN.num_rows
        assert counts.sum() == expected
        assert len(edges) <= 21
    assert figure.axes[4].get_title(loc="left") == "reward"
    assert "unknown" in texts(figure.axes[4])


def test_trends_show_averages_per_step():
    calls = [
        call(name, [1], [2], step=step)
        for name, step in zip("abc", (1, 1, 3), strict=True)
    ]
    turns = tk.from_records(calls)
    _, report = tk.linearize(turns, reward={"a": 1.0, "b": 2.0, "c": 5.0}, report=True)
    figure = tk.plot.run(turns, report)
    trends = {ax.get_title(loc="left"): ax for ax in figure.axes[6:]}
    (line,) = trends["mean reward"].lines
    assert line.get_xydata().tolist() == [[1, 1.5], [3, 5]]
    assert "unknown" in texts(trends["mean logprob"])


def test_lanes_show_times():
    turns = tk.from_records(
        [
            call("a", [1], [2], start=1, stop=3),
            call("a", [1, 2, 3], [4], start=2, stop=4),
            call("a", [1, 2, 3, 4], [5], start=6, stop=7),
            call("b", [1], [2], start=3, stop=6),
            call("b", [1, 2, 3], [4], start=8, stop=9),
        ]
    )
    figure = tk.plot.swimlanes(turns)
    (ax,) = figure.axes
    found = {}
    for one in ax.collections:
        kind = next(
            k for k, c in TIMES.items() if colors.same_color(one.get_facecolor(), c)
        )
        for path in one.get_paths():
            (left, low), (right, high) = path.get_extents().get_points()
            found.setdefault(kind, []).append((left, right, low, high))
    approx = pytest.approx
    assert found["generation"] == [
        approx((0, 2, -0.4, 0)),
        approx((5, 6, -0.4, 0)),
        approx((1, 3, 0, 0.4)),
        approx((2, 5, 0.6, 1.4)),
        approx((7, 8, 0.6, 1.4)),
    ]
    assert found["queue"] == [approx((0, 2, 0.6, 1.4))]
    assert found["tool"] == [approx((3, 5, -0.4, 0.4)), approx((5, 7, 0.6, 1.4))]
    assert {"generation 9.0 s", "tool 4.0 s", "queue 2.0 s"} <= {*texts(figure)}


def test_hostile_names_are_text_and_files_are_the_same_again(tmp_path):
    _, report = tk.linearize(SMALL, report=True)
    figures = {
        "tokens": lambda: tk.plot.tokens(SMALL),
        "swimlanes": lambda: tk.plot.swimlanes(SMALL),
        "run": lambda: tk.plot.run(SMALL, report),
    }
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    for name, figure in figures.items():
        found = drawn(figure(), tmp_path)
        first = (tmp_path / "a.svg").read_bytes()
        assert name == "run" or any(shown in text for text in found)
        drawn(figure(), tmp_path)
        assert (tmp_path / "a.svg").read_bytes() == first


def test_empty_tables_have_figures(tmp_path):
    empty = SMALL.slice(0, 0)
    _, report = tk.linearize(empty, report=True)
    for figure in (
        tk.plot.drift(DRIFT.empty_table()),
        tk.plot.policies(SIMULATION.empty_table()),
        tk.plot.policies(tk.simulate(empty)),
        tk.plot.run(empty, report),
    ):
        drawn(figure, tmp_path)
    with pytest.raises(tk.errors.UnknownSessionError, match="there are no turns"):
        tk.plot.tokens(empty)
    with pytest.raises(tk.errors.SchemaError, match="null in all 0 turns"):
        tk.plot.swimlanes(empty)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    tk.write_turns(SMALL, folder / "turns.parquet")
    sessions = pa.table({"session_id": [HOSTILE], "reward": [0.25]})
    tk.write_sessions(sessions, folder / "sessions.parquet")
    return folder


def test_the_command_writes_every_kind(run_folder, tmp_path):
    for kind in ("tokens", "drift", "policies", "run", "swimlanes"):
        for suffix, first in (("svg", b"<?xml"), ("png", b"\x89PNG")):
            path = tmp_path / f"{kind}.{suffix}"
            assert main(["plot", kind, str(run_folder), "-o", str(path)]) == 0
            assert path.read_bytes().startswith(first)
    save(tk.plot.tokens(SMALL, "trl"), tmp_path / "again.svg", "svg")
    again = (tmp_path / "again.svg").read_bytes()
    path = tmp_path / "tokens.svg"
    arguments = ["plot", "tokens", str(run_folder), "-o", str(path), "--policy", "trl"]
    assert main(arguments) == 0
    assert path.read_bytes() == again
    # rewards are read from the folder of the run
    assert "mean 0.25, max 0.25" in (tmp_path / "run.svg").read_text("utf-8")


def test_without_matplotlib_errors_name_the_extra(
    run_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(tk.errors.ArgumentError, match=r"pip install 'trajkit\[plot\]'"):
        tk.plot.drift(DRIFT.empty_table())
    path = tmp_path / "a.svg"
    for kind in ("tokens", "drift", "policies", "run", "swimlanes"):
        assert main(["plot", kind, str(run_folder), "-o", str(path)]) == 2
        assert "trajkit[plot]" in capsys.readouterr().err
    assert not path.exists()
    assert main(["plot", "forest", str(run_folder), "-o", str(path)]) == 0
    assert main(["plot", "trace", str(run_folder), "-o", str(tmp_path / "a.json")]) == 0
    assert main(["report", str(run_folder), "-o", str(tmp_path / "a.html")]) == 0


def test_colors_differ():
    for named in (OUTPUTS, ROLES, REGIONS, TIMES):
        assert len({*named.values()}) == len(named)
        for first, second in combinations(named.values(), 2):
            a, b = (np.array(colors.to_rgb(one)) for one in (first, second))
            assert np.abs(a - b).sum() > 0.2
