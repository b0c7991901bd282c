"""Figures on matplotlib, the extra ``plot``.

Each function returns a ``matplotlib.figure.Figure``. It raises ArgumentError if matplotlib
is not installed, and for its tables what the function that makes them raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajkit.analysis.words import MUTED, OUTPUTS, ROLES, TEXT, TIMES
from trajkit.errors import ArgumentError
from trajkit.plot.timeline import Slice, slices_of
from trajkit.plot.turn_tokens import session_tokens
from trajkit.policies import Policy
from trajkit.tables.canonical import TableLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": MUTED,
    "axes.labelcolor": TEXT,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.titlesize": 12,
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
    # text stays text, and the same figure gives the same file
    "svg.fonttype": "none",
    "svg.hashsalt": "trajkit",
    # names of sessions may have dollar signs
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.color": MUTED,
    "ytick.labelcolor": TEXT,
}


def tokens(
    turns: TableLike,
    policy: str | Policy = "faithful",
    session_id: str | None = None,
) -> Figure:
    """The tokens of each turn of a session: its prompt by role, its output by fate.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form. Roles come from the columns of
        `trajkit.schema.ATTRIBUTION`. Without them, only tokens that an earlier turn
        sampled are known, as those of the assistant.
    policy : str or Policy
        The policy whose rows train the outputs.
    session_id : str, optional
        Default: the session with the most turns, the first on ties.

    Raises
    ------
    UnknownSessionError
        ``turns`` has no such session.
    """
    found = session_tokens(turns, policy, session_id)
    n = len(found.turns)
    with _figure(f"Session {found.session_id}, policy {found.policy}") as figure:
        figure.set_size_inches(max(7.0, min(2.6 + 0.28 * n, 24)), 5.4)
        above, below = figure.subplots(2, 1, sharex=True)
        _stacks(above, found.roles, ROLES)
        above.set(title="Prompt, by role", ylabel="tokens")
        _stacks(below, found.kinds, OUTPUTS)
        sampled = sum(int(counts.sum()) for counts in found.kinds.values())
        trained = int(found.kinds["trained"].sum())
        title = f"Output: {trained:,} of {sampled:,} sampled tokens are trained"
        below.set(title=title, ylabel="tokens", xlabel="turn")
        step = -(-n // 40)
        below.set_xticks(range(0, n, step), [str(turn) for turn in found.turns[::step]])
    return figure


def swimlanes(turns: TableLike, sessions: TableLike | None = None) -> Figure:
    """When each session waited, generated and ran tools.

    A lane per session, by its start. *generation*: a call, with the time that it waited at
    the engine; calls that overlap are below each other. *tool*: no call of the session
    runs. *queue*: the run has begun, and the session has not.

    Parameters
    ----------
    turns : table
        Turns with ``started_at`` and ``ended_at`` (timestamps), as the gateway writes
        them: when it read the request, and when the sample was complete. Turns without
        times are left out.
    sessions : table, optional
        Its columns ``started_at`` (timestamp) and ``seconds``, as ``trajkit rollout``
        writes them, say when a rollout started and how long it took.

    Raises
    ------
    SchemaError
        A column of times is missing or is not a timestamp, or all times are null.
    InvalidTurnsError
        A turn ended before it started.
    """
    seconds = dict.fromkeys(TIMES, 0.0)
    lanes: dict[str, list[Slice]] = {}
    for one in slices_of(turns, sessions):
        seconds[one.kind] += one.stop - one.start
        lanes.setdefault(one.session_id, []).append(one)
    n = len(lanes)
    with _figure(f"{n:,} session{'s' * (n != 1)} over time") as figure:
        from matplotlib.patches import Patch

        figure.set_size_inches(10, min(1.5 + 0.3 * n, 40))
        ax = figure.subplots()
        for y, own in enumerate(lanes.values()):
            height = 0.8 / (1 + max(one.lane for one in own))
            ranges: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for one in own:
                line = ranges.setdefault((one.kind, one.lane), [])
                line.append((one.start, one.stop - one.start))
            for (kind, lane), line in ranges.items():
                place = y - 0.4 + lane * height, height if kind == "generation" else 0.8
                ax.broken_barh(line, place, color=TIMES[kind])
        ax.set(xlabel="seconds since the run began", ylim=(n - 0.5, -0.5))
        step = -(-n // 120)
        names = [_printable(name) for name in lanes]
        ax.set_yticks(range(0, n, step), names[::step])
        ax.margins(x=0.01)
        labels = {
            f"{kind} {seconds[kind]:,.1f} s": color for kind, color in TIMES.items()
        }
        handles = [Patch(color=color, label=label) for label, color in labels.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=7)
    return figure


def save(figure: Figure, path: str | Path, format: str) -> None:
    """Write a figure; the same figure gives the same SVG file."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(path, format=format, metadata=metadata, dpi=150)


@contextmanager
def _figure(title: str) -> Iterator[Figure]:
    """An empty figure in our style, which is not registered with pyplot."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "this picture needs matplotlib: pip install 'trajkit[plot]'"
        ) from error
    with mpl.rc_context(_STYLE):
        figure = Figure(layout="constrained")
        figure.suptitle(_printable(title), x=0.01, ha="left")
        yield figure


Counts = dict[str, npt.NDArray[Any]]


def _stacks(ax: Axes, counts: Counts, colors: dict[str, str]) -> None:
    """A stacked bar per turn, and a legend of the kinds that occur."""
    base: npt.NDArray[Any] = np.zeros(1)
    for kind, of in counts.items():
        if of.sum():
            label = f"{_words(kind)} {of.sum():,.0f}"
            ax.bar(range(len(of)), of, 0.9, base, color=colors[kind], label=label)
            base = base + of
    if ax.has_data():
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), title="over all turns")
    ax.yaxis.set_major_formatter("{x:,.0f}")


def _words(name: str) -> str:
    """A name of the schema as words."""
    return name.replace("_", " ")


def _printable(text: str) -> str:
    """The text with U+FFFD for each character that is not printable, as XML has none."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
