"""Figures show the numbers of the tables that they are drawn from."""

import sys
from datetime import UTC, datetime, timedelta
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import linearized, turns_table
from trajkit.analysis.words import OUTPUTS, ROLES, TIMES
from trajkit.cli import main

colors = pytest.importorskip("matplotlib.colors")
from trajkit.plot.figures import output_kinds, prompt_roles, save, slices_of  # noqa: E402

RUN = turns_table(generated_runs(12, 5))
HOSTILE = "$\\frac{$ <script>\x1b\u202e&"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds):
    return None if seconds is None else BEGAN + timedelta(seconds=seconds)


def call(session_id, start, stop, prompt=(1,), output=(2,)):
    return {
        "session_id": session_id,
        "prompt_ids": prompt,
        "output_ids": output,
        "started_at": at(start),
        "ended_at": at(stop),
    }


def timed(*calls):
    """Turns of (session, started, ended)."""
    return tk.from_records([call(*one) for one in calls])


SMALL = timed((HOSTILE, 0, 1, [1, 2], [3, 4]), (HOSTILE, 2, 4, [1, 2, 3, 5, 6], [7]))


def bars(ax, color):
    """x, y, width and height of the bars of a color."""
    return [
        (bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height())
        for bar in ax.patches
        if colors.same_color(bar.get_facecolor(), color)
    ]


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


@pytest.mark.parametrize("policy", ["faithful", "slime", "nemo", "miles"])
def test_bars_of_turns_are_the_counts_of_the_report(policy):
    _, report = linearized(RUN, policy)
    for line in report.to_pylist()[:4]:
        name = line["session_id"]
        figure = tk.plot.tokens(RUN, policy, name)
        prompts, outputs = figure.axes
        for kind, color in OUTPUTS.items():
            n = line["tokens_trained" if kind == "trained" else f"lost_{kind}"]
            assert sum(height for *_, height in bars(outputs, color)) == n
        session = RUN.filter(pa.compute.equal(RUN["session_id"], name))
        delta = tk.compact(session)
        for counted in (prompt_roles, output_kinds):
            full, found = (counted(of, tk.policy(policy)) for of in (session, delta))
            assert all((found[key] == full[key]).all() for key in full)
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
    prompts = ([1], [2, 3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 6], [7])
    turns = timed(*(("a", 0, 1, *ids) for ids in prompts))
    assert tk.analysis.output_spans(turns, "nemo").num_rows == 4
    found = output_kinds(turns, tk.policy("nemo"))
    assert found["trained"].tolist() == [2, 1, 1]


def test_roles_come_from_attribution_and_else_from_the_path():
    asks = [{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}]
    reply = {"role": "assistant", "content": "r"}
    more = [*asks, reply, {"role": "tool", "content": "t"}]
    first = {
        **call("a", 0, 1, [1, 2, 3], [4, 5]),
        "prompt_messages": asks,
        "response_message": reply,
        "prompt_message_index": [0, 1, -1],
    }
    second = {
        **call("a", 1, 2, [1, 2, 3, 4, 5, 6, 7, 8], [9]),
        "prompt_messages": more,
        "prompt_message_index": [-1] * 5 + [3, 3, 9],
    }
    turns = tk.from_records([first, second])
    assert_stacked(tk.plot.tokens(turns).axes[0], 1, 5)
    found = prompt_roles(turns, tk.policy("faithful"))
    assert {role: counts.tolist() for role, counts in found.items()} == {
        "system": [1, 1],
        "user": [1, 1],
        "assistant": [0, 2],
        "tool": [0, 2],
        "other": [1, 2],
    }


def test_lanes_show_times():
    turns = timed(("a", 1, 3), ("a", 2, 4), ("a", 6, 7), ("b", 3, 6), ("b", 8, 9))
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
        approx((1, 3, 0, 0.4)),
        approx((5, 6, -0.4, 0)),
        approx((2, 5, 0.6, 1.4)),
        approx((7, 8, 0.6, 1.4)),
    ]
    assert found["queue"] == [approx((0, 2, 0.6, 1.4))]
    assert found["tool"] == [approx((3, 5, -0.4, 0.4)), approx((5, 7, 0.6, 1.4))]
    assert {"generation 9.0 s", "tool 4.0 s", "queue 2.0 s"} <= {*texts(figure)}


def test_time_without_a_call_is_queue_before_the_session_and_tool_in_it():
    turns = timed(("a", 1, 2), ("a", 2.5, 4), ("b", 3, 5))
    assert slices_of(turns) == [
        ("a", "generation", 0, 1, 0, 0),
        ("a", "tool", 1, 1.5, None, 0),
        ("a", "generation", 1.5, 3, 1, 0),
        ("b", "queue", 0, 2, None, 0),
        ("b", "generation", 2, 4, 0, 0),
    ]
    # calls that overlap have lanes, and turns without times are left out
    turns = timed(("a", 0, 10), ("a", 1, 3), ("a", 2, 4), ("a", 3, 5))
    assert [line[-2:] for line in slices_of(turns)] == [(0, 0), (1, 1), (2, 2), (3, 1)]
    turns = timed(("a", 1, 2), ("a", None, 3), ("a", 3, None), ("b", None, None))
    assert slices_of(turns) == [("a", "generation", 0, 1, 0, 0)]
    # the session that starts first is the first
    turns = timed(("b", 3, 4), ("c", 2, 3), ("a", 1, 2), ("a", 5, 6))
    assert [*dict.fromkeys(one[0] for one in slices_of(turns))] == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            turns_table(generated_runs(1)),
            "column 'started_at': .* no column.*trajkit serve",
        ),
        (SMALL.drop_columns(["ended_at"]), "column 'ended_at': .* no column"),
        (timed(("a", None, 1)), "are null in all 1 turns"),
        (SMALL.slice(0, 0), "are null in all 0 turns"),
        (
            tk.from_records([{**call("a", 0, 1), "started_at": 1.5}]),
            "column 'started_at': expected timestamps, found double",
        ),
        (timed(("a", 2, 1)), "'a', turn 0.*1,000,000 microseconds"),
    ],
)
def test_turns_without_a_timeline_are_refused(turns, message):
    errors = tk.errors.SchemaError, tk.errors.InvalidTurnsError
    with pytest.raises(errors, match=message):
        tk.plot.swimlanes(turns)


def test_hostile_names_are_text_and_files_are_the_same_again(tmp_path):
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    for figure in (tk.plot.tokens, tk.plot.swimlanes):
        found = drawn(figure(SMALL), tmp_path)
        first = (tmp_path / "a.svg").read_bytes()
        assert any(shown in text for text in found)
        drawn(figure(SMALL), tmp_path)
        assert (tmp_path / "a.svg").read_bytes() == first
    with pytest.raises(tk.errors.UnknownSessionError, match="there are no turns"):
        tk.plot.tokens(SMALL.slice(0, 0))


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    tk.write_turns(SMALL, folder / "turns.parquet")
    return folder


def test_the_command_writes_every_kind(run_folder, tmp_path):
    for kind in ("tokens", "swimlanes"):
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


def test_without_matplotlib_errors_name_it(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        tk.plot.tokens(SMALL)
    path = tmp_path / "a.svg"
    for kind in ("tokens", "swimlanes"):
        assert main(["plot", kind, str(run_folder), "-o", str(path)]) == 2
        assert "pip install matplotlib" in capsys.readouterr().err
    assert not path.exists()


def test_colors_differ():
    for named in (OUTPUTS, ROLES, TIMES):
        assert len({*named.values()}) == len(named)
        for first, second in combinations(named.values(), 2):
            a, b = (np.array(colors.to_rgb(one)) for one in (first, second))
            assert np.abs(a - b).sum() > 0.2
