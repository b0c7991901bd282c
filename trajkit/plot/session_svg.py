"""`forest`: a session as SVG: its calls, their drift, and the tokens each policy trains."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike
from trajkit.analysis.branches import label_branches
from trajkit.analysis.colors import COLORS, MUTED, TEXT
from trajkit.analysis.drift import classify_drift
from trajkit.analysis.simulation import label
from trajkit.pipeline.links import link
from trajkit.pipeline.rows import linearize
from trajkit.plot.markup import escaped
from trajkit.plot.turn_tokens import one_session
from trajkit.policies import PRESETS, Policy
from trajkit.policies import policy as named_policy
from trajkit.turns.delta import expand

# pixels: left edge and width of the bars, left edge of the policies, size of a column
# and of a lane, top of the lanes
_LEFT, _BARS, _RIGHT, _COLUMN, _LANE, _TOP = 104, 520, 638, 25, 24, 92
_LEGEND = (
    (12, "context", "prompt"),
    (92, "drift", "drift: the prompt differs from what was sampled"),
    (400, "trained", "trained (left: by the first policy)"),
    (640, "output", "sampled, not trained"),
)
_STYLE = f"""\
text {{ font: 11px system-ui, sans-serif; fill: {TEXT} }}
.title {{ font-size: 14px; font-weight: 600 }} .small {{ font-size: 10px; fill: {MUTED} }}
.context {{ fill: {COLORS["context"]}; stroke: {COLORS["context"]} }}
.output {{ fill: {COLORS["sampled"]}; stroke: {COLORS["trained"]} }}
.trained {{ fill: {COLORS["trained"]} }}
.drift {{ fill: {COLORS["drift"]}; stroke: {COLORS["drift"]} }}
"""

Mask: TypeAlias = npt.NDArray[np.bool_]


class _Call(NamedTuple):
    """One call. Positions count tokens from the start of its prompt."""

    turn_index: int
    label: str
    # lane of its parent, or -1
    parent: int
    # where it leaves its parent's path, and the number of the path's tokens after that
    lcp: int
    n_drifted: int
    n_prompt: int
    n_output: int


def forest(
    turns: TableLike,
    session_id: str | None = None,
    *,
    policies: Iterable[str | Policy] | None = None,
) -> str:
    """Draw a session as an SVG document; the same turns give the same text.

    Each call is a bar that starts at the token where it leaves its parent. Drift is orange,
    tokens that the first policy trains are blue. Each policy has a column on the right.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    session_id : str, optional
        Default: the session with the most turns, the first on ties.
    policies : iterable of str or Policy, optional
        Policies to show, one column each. Default: every preset.

    Raises
    ------
    UnknownSessionError
        ``turns`` has no such session. Otherwise as for `trajkit.linearize`.
    """
    session_id, session = one_session(turns, session_id)
    session = expand(session)
    calls = _calls_of(session)
    chosen = map(named_policy, PRESETS if policies is None else policies)
    trained = {
        label(one): _trained_by(linearize(session, one), calls) for one in chosen
    }
    return _document(session_id, calls, trained)


def _calls_of(session: pa.Table) -> list[_Call]:
    links = link(session)
    indices = session["turn_index"].to_pylist()
    leaves = {
        line["turn_index"]: (indices.index(line["parent"]), line["lcp"], line["size"])
        for line in classify_drift(session, links).to_pylist()
    }
    labels = {
        line["turn_index"]: line["label"].replace("_", "-")
        for line in label_branches(session, links).to_pylist()
    }
    columns = (session["prompt_ids"], session["output_ids"])
    lengths = [pc.list_value_length(column).to_pylist() for column in columns]
    return [
        _Call(turn, labels.get(turn, ""), *leaves.get(turn, (-1, 0, 0)), *length)
        for turn, *length in zip(indices, *lengths, strict=True)
    ]


def _trained_by(rows: pa.Table, calls: list[_Call]) -> tuple[list[Mask], int]:
    """Which tokens of each call's output some row trains, and the number of rows."""
    trained = {call.turn_index: np.zeros(call.n_output, bool) for call in calls}
    for span in pc.list_flatten(rows["spans"]).to_pylist():
        if span["kind"] == "trained":
            output = trained[span["turn_index"]]
            output[span["output_start"] : span["output_stop"]] = True
    return list(trained.values()), rows.num_rows


def _document(
    session_id: str, calls: list[_Call], trained: dict[str, tuple[list[Mask], int]]
) -> str:
    bottom = _TOP + _LANE * len(calls)
    size = f'width="{_RIGHT + _COLUMN * len(trained) + 14}" height="{bottom + 74}"'
    n_sampled = sum(call.n_output for call in calls)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<style>\n{_STYLE}</style>",
        f'<rect {size} fill="white"/>',
        _text(12, 24, f"Session {session_id}", "title"),
        _text(12, 42, f"{len(calls)} calls, {n_sampled:,} sampled tokens", "small"),
        _text(_RIGHT - 8, bottom + 14, "% of tokens trained", "small", "end"),
        _text(_RIGHT - 8, bottom + 30, "rows", "small", "end"),
    ]
    parts += _lanes(calls, next(iter(trained.values()), ([], 0))[0])
    for column, (name, (masks, n_rows)) in enumerate(trained.items()):
        left = _RIGHT + _COLUMN * column
        turned = f'transform="translate({left + 15} {_TOP - 8})rotate(-60)"'
        parts.append(f"<text {turned}>{escaped(name)}</text>")
        for lane, mask in enumerate(masks):
            y, width = _TOP + _LANE * lane, 20 * mask.sum() / max(mask.size, 1)
            parts.append(_bar("output", left, y, left + 20))
            parts.append(_bar("trained", left, y, left + width))
        share = 100 * sum(int(mask.sum()) for mask in masks) / max(n_sampled, 1)
        parts.append(_text(left + 10, bottom + 14, f"{share:.0f}", "small", "middle"))
        parts.append(_text(left + 10, bottom + 30, str(n_rows), "small", "middle"))
    for at, kind, meaning in _LEGEND:
        parts.append(_bar(kind, at, bottom + 48, at + 14))
        parts.append(_text(at + 20, bottom + 62, meaning))
    return "\n".join([*parts, "</svg>", ""])


def _lanes(calls: list[_Call], trained: list[Mask]) -> Iterator[str]:
    """The calls as bars, and the lines from each to the call that it continues."""
    # The first prompt is long and uniform: cut most of it off on the left.
    low = min(call.n_prompt for call in calls if call.parent < 0) * 9 // 10
    high = max(call.n_prompt + call.n_output for call in calls)

    def x(position: int) -> float:
        return _LEFT + _BARS * max(position - low, 0) / max(high - low, 1)

    below = _TOP + _LANE * len(calls) + 14
    yield _text(_LEFT, below, f"tokens {low:,} to {high:,}", "small")
    for lane, call in enumerate(calls):
        if call.parent >= 0:
            line = f"M{x(call.lcp):.1f} {_TOP + _LANE * call.parent + 19}"
            kind = "drift" if call.n_drifted else "context"
            yield f'<path class="{kind}" d="{line}V{_TOP + _LANE * lane}"/>'
    for lane, call in enumerate(calls):
        y = _TOP + _LANE * lane
        yield _text(12, y + 14, f"{call.turn_index} {call.label}")
        yield _bar("context", x(call.lcp), y, x(call.n_prompt))
        yield _bar("output", x(call.n_prompt), y, x(call.n_prompt + call.n_output))
        for mask in trained[lane : lane + 1]:
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
            for start, stop in (call.n_prompt + edges.reshape(-1, 2)).tolist():
                yield _bar("trained", x(start), y, x(stop))
        if call.n_drifted:
            changed = x(min(call.lcp + call.n_drifted, call.n_prompt))
            yield _bar("drift", x(call.lcp), y, max(changed, x(call.lcp) + 3))


def _bar(kind: str, start: float, y: int, stop: float) -> str:
    place = f'x="{start:.1f}" y="{y}" width="{max(stop - start, 0):.1f}" height="19"'
    return f'<rect class="{kind}" {place}/>'


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    place = f'class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}"'
    return f"<text {place}>{escaped(text)}</text>"
