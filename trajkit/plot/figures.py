"""Figures on matplotlib, the extra ``plot``, and the numbers that they draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import errors
from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.words import OUTPUTS, ROLES, TIMES
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import find_links
from trajkit.tables.canonical import TableLike
from trajkit.tables.columns import take_session, tuples
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    # text stays text, and the same figure gives the same file
    "svg.fonttype": "none",
    "svg.hashsalt": "trajkit",
    # names of sessions may have dollar signs
    "text.parse_math": False,
}

# role of a message to a role of ROLES; any other is "other"
_ROLES = {**{role: role for role in ROLES}, "developer": "system", "function": "tool"}
_TIMES = ("started_at", "ended_at")

Slice: TypeAlias = tuple[str, str, float, float, int | None, int]
"""A session, what it does (generation, tool, queue), start and stop in seconds of the run,
and of a generation its turn and lane: calls that overlap have different lanes."""
Counts: TypeAlias = dict[str, npt.NDArray[np.int64]]
"""Tokens by kind, one array of shape (n_turns,) each."""


def tokens(
    turns: TableLike, policy: str | Policy = "faithful", session_id: str | None = None
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
    chosen, table = named_policy(policy), as_turns(turns)
    if not table.num_rows:
        raise errors.UnknownSessionError("there are no turns, so no session to draw")
    if session_id is None:
        session_id = Counter(table["session_id"].to_pylist()).most_common(1)[0][0]
    session = take_session(table, session_id)
    outputs, n = output_kinds(session, chosen), session.num_rows
    with _figure(f"Session {session_id}, policy {chosen.name}") as figure:
        figure.set_size_inches(max(7.0, min(2.6 + 0.28 * n, 24)), 5.4)
        above, below = figure.subplots(2, 1, sharex=True)
        _stacks(above, prompt_roles(session, chosen), ROLES)
        above.set(title="Prompt, by role", ylabel="tokens")
        _stacks(below, outputs, OUTPUTS)
        n_trained, n_all = outputs["trained"].sum(), sum(map(np.sum, outputs.values()))
        title = f"Output: {n_trained:,} of {n_all:,} sampled tokens are trained"
        below.set(title=title, ylabel="tokens", xlabel="turn")
        step = -(-n // 40)
        below.set_xticks(range(0, n, step), session["turn_index"].to_pylist()[::step])
    return figure


def output_kinds(session: pa.Table, policy: Policy) -> Counts:
    """The tokens of each output by what the policy does with them."""
    turns = {turn: k for k, turn in enumerate(session["turn_index"].to_pylist())}
    kinds = {kind: np.zeros(len(turns), np.int64) for kind in OUTPUTS}
    names = "kind", "turn_index", "output_start", "output_stop"
    spans = tuples(output_spans(session, policy), *names)
    # a policy may train a token twice
    tokens = {(kind, turn, k) for kind, turn, a, b in spans for k in range(a, b)}
    for kind, turn, _ in tokens:
        kinds[kind][turns[turn]] += 1
    return kinds


def prompt_roles(session: pa.Table, policy: Policy) -> Counts:
    """The tokens of each prompt by role.

    A token without attribution has the role that it has in the parent's path, as far as
    the prompt repeats that path.
    """
    calls, names = Sessions.of(session), [*ROLES]
    attributed, links = SessionCalls(calls), find_links(calls, calls.forest, policy)
    counts = np.zeros((len(ROLES), session.num_rows), np.int64)
    paths: list[npt.NDArray[np.int8]] = []
    for call, (parent, lcp) in enumerate(links[["parent", "lcp"]].tolist()):
        n_prompt = int(attributed.n_prompt[call])
        path = np.full(attributed.path_len[call], names.index("other"), np.int8)
        path[n_prompt:] = names.index("assistant")
        if 0 <= parent < call:  # under nemo, a parent may come later
            path[:lcp] = paths[parent][:lcp]
        rendered, messages = attributed.rendered(call), attributed.messages(call)
        if rendered is not None and messages is not None:
            shown = [_ROLES.get(role, "other") for role in messages.roles]
            roles = np.array([names.index(role) for role in shown[rendered.first :]])
            known = (rendered.message >= 0) & (rendered.message < len(roles))
            path[:n_prompt][known] = roles[rendered.message[known]]
        paths.append(path)
        counts[:, call] = np.bincount(path[:n_prompt], minlength=len(ROLES))
    return dict(zip(names, counts, strict=True))


def swimlanes(turns: TableLike) -> Figure:
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

    Raises
    ------
    SchemaError
        A column of times is missing or is not a timestamp, or all times are null.
    InvalidTurnsError
        A turn ended before it started.
    """
    slices = slices_of(turns)
    places = {name: k for k, name in enumerate(dict.fromkeys(one[0] for one in slices))}
    n_lanes = {name: lane + 1 for name, *_, lane in sorted(slices, key=itemgetter(5))}
    n = len(places)
    with _figure(f"{n:,} session{'s' * (n != 1)} over time") as figure:
        from matplotlib.collections import PolyCollection

        figure.set_size_inches(10, min(1.5 + 0.3 * n, 40))
        ax = figure.subplots()
        for kind, color in TIMES.items():
            boxes = []
            for name, own, start, stop, _, lane in slices:
                if own == kind:
                    height = 0.8 / (n_lanes[name] if kind == "generation" else 1)
                    low = places[name] - 0.4 + lane * height
                    boxes.append((start, low, stop, low + height))
            label = f"{kind} {sum(box[2] - box[0] for box in boxes):,.1f} s"
            corners = [[(a, c), (a, d), (b, d), (b, c)] for a, c, b, d in boxes]
            ax.add_collection(PolyCollection(corners, facecolor=color, label=label))
        ax.set(xlabel="seconds since the run began", ylim=(n - 0.5, -0.5))
        step = -(-n // 120)
        ax.set_yticks(range(0, n, step), [*map(_printable, places)][::step])
        ax.margins(x=0.01)
        ax.autoscale_view(scaley=False)
        figure.legend(loc="outside lower left", ncols=7)
    return figure


def slices_of(turns: TableLike) -> list[Slice]:
    """The times of each session, by its start; see `trajkit.plot.swimlanes`."""
    table = as_turns(turns)
    calls: dict[str, list[tuple[int, int, int]]] = {}
    for (name, turn), start, stop in zip(
        tuples(table, "session_id", "turn_index"),
        *(_micros(table, time) for time in _TIMES),
        strict=True,
    ):
        if None not in (start, stop):
            if stop < start:
                raise errors.InvalidTurnsError(
                    f"session {name!r}, turn {turn}: ended_at is {start - stop:,} "
                    "microseconds before started_at"
                )
            calls.setdefault(name, []).append((start, stop, turn))
    if not calls:
        raise errors.SchemaError(
            f"{' and '.join(_TIMES)} are null in all {table.num_rows} turns: there is no "
            "timeline without times, which `trajkit serve` records"
        )
    began, found = min(min(own)[0] for own in calls.values()), list[Slice]()
    for name, own in sorted(calls.items(), key=lambda one: min(one[1])):
        times = [((a - began) / 1e6, (b - began) / 1e6, k) for a, b, k in sorted(own)]
        # until when something is known, and when each lane is free
        busy, lanes = times[0][0], list[float]()
        found.append((name, "queue", 0.0, busy, None, 0))
        for start, stop, turn in times:
            found.append((name, "tool", busy, start, None, 0))
            free = (k for k, until in enumerate(lanes) if until <= start)
            lane = next(free, len(lanes))
            lanes[lane : lane + 1] = [stop]
            found.append((name, "generation", start, stop, turn, lane))
            busy = max(busy, stop)
    return [one for one in found if one[4] is not None or one[2] < one[3]]


def _micros(turns: pa.Table, name: str) -> list[Any]:
    """A column of timestamps, in microseconds since 1970."""
    known = name in turns.column_names
    found = turns.schema.field(name).type if known else "no column"
    if not known or not (pa.types.is_timestamp(found) or pa.types.is_null(found)):
        raise errors.SchemaError(
            f"turns, column {name!r}: expected timestamps, found {found}. `trajkit serve` "
            "records the times that a timeline needs"
        )
    micros = pa.timestamp("us", getattr(found, "tz", None))
    return list(turns[name].cast(micros, safe=False).cast(pa.int64()).to_pylist())


def save(figure: Figure, path: str | Path, format: str) -> None:
    """Write a figure; the same figure gives the same SVG file."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(path, format=format, metadata=metadata, dpi=150)


@contextmanager
def _figure(title: str) -> Iterator[Figure]:
    """An empty figure in our style, which is not registered with pyplot."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(layout="constrained")
        figure.suptitle(_printable(title), x=0.01, ha="left")
        yield figure


def _stacks(ax: Axes, counts: Counts, colors: dict[str, str]) -> None:
    """A stacked bar per turn, and a legend of the kinds that occur."""
    base: npt.NDArray[Any] = np.zeros(1)
    for kind, of in counts.items():
        if of.sum():
            label = f"{kind.replace('_', ' ')} {of.sum():,.0f}"
            ax.bar(range(len(of)), of, 0.9, base, color=colors[kind], label=label)
            base = base + of
    if ax.has_data():
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), title="over all turns")
    ax.yaxis.set_major_formatter("{x:,.0f}")


def _printable(text: str) -> str:
    """The text with U+FFFD for each character that is not printable, as XML has none."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
