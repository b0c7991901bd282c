"""What came out of a training run: a line per policy, and a picture."""

from collections.abc import Iterator
from html import escape
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Line: TypeAlias = dict[str, Any]

# the mean over the last steps is less noisy than the last one
LAST = 5
_COLORS = ("#2f74c0", "#d1332e", "#2a8c4a", "#8a5cc2", "#c77d0a", "#57606a")


def compare(steps: pa.Table) -> list[Line]:
    """Return a line per policy; ``steps`` is ordered by policy, seed and step.

    Counts and mismatch are those of the first step, where the rollouts of all policies
    are the same. Rewards, and shares of replies with reasoning, are means over seeds.
    """
    lines = []
    for name, own in _by_policy(steps).items():
        first = own.filter(pc.equal(own["step"], 0)).to_pydict()
        trained = sum(first["tokens_trained"])
        reward, thinking = _by_seed(own, "reward"), _by_seed(own, "thinking")
        middle = max((reward.shape[1] - LAST) // 2, 0)
        line = {
            "policy": name,
            "rows": sum(first["rows"]),
            "trained": trained,
            "of_sampled": trained / sum(first["tokens_sampled"]),
            "forward": sum(first["tokens_forward"]),
            "as_trees": sum(first["tokens_packed"]),
            "mismatch": np.average(
                first["mismatch_mean"], weights=first["tokens_trained"]
            ),
            "first": reward[:, 0].mean(),
            "middle": reward[:, middle : middle + LAST].mean(),
            "last": reward[:, -LAST:].mean(),
            "per_seed": reward[:, -LAST:].mean(1).tolist(),
            "thinking": [thinking[:, 0].mean(), thinking[:, -LAST:].mean()],
        }
        lines.append(line)
    return lines


def draw(steps: pa.Table) -> str:
    """Reward over steps as SVG: a thin line per seed, a thick one for their mean."""
    rewards = {name: _by_seed(own, "reward") for name, own in _by_policy(steps).items()}
    width, height, left = 560, 260, 44
    n_steps = max(run.shape[1] for run in rewards.values())
    xs = left + width * np.arange(n_steps) / max(n_steps - 1, 1)

    def path(run: npt.NDArray[np.float64], style: str) -> str:
        ys = height * (1 - run) + 14
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        return f'<polyline points="{points}" fill="none" {style}/>'

    def parts() -> Iterator[str]:
        yield "<title>Mean reward over optimizer steps</title>"
        yield "<style>text { font: 11px system-ui, sans-serif; fill: #24292f }</style>"
        yield '<rect width="100%" height="100%" fill="#fff"/>'
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = height * (1 - tick) + 14
            yield f'<path d="M{left} {y}h{width}" stroke="#d8dee4"/>'
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick}</text>'
        for step in range(0, n_steps, 5):
            yield f'<text x="{xs[step]:.1f}" y="292" text-anchor="middle">{step}</text>'
        for i, (policy, runs) in enumerate(rewards.items()):
            color = f'stroke="{_COLORS[i % len(_COLORS)]}"'
            yield from (path(run, f'{color} stroke-opacity="0.3"') for run in runs)
            yield path(runs.mean(0), f'{color} stroke-width="2.5"')
            x = left + 110 * i
            yield f'<path d="M{x} 312h20" {color} stroke-width="2.5"/>'
            yield f'<text x="{x + 26}" y="316">{escape(policy)}</text>'

    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 16} 326"'
    return "\n".join([f"<svg {box}>", *parts(), "</svg>\n"])


def _by_policy(steps: pa.Table) -> dict[str, pa.Table]:
    names = pc.unique(steps["policy"]).to_pylist()
    return {name: steps.filter(pc.equal(steps["policy"], name)) for name in names}


def _by_seed(own: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """A column of one policy, of shape (seeds, steps)."""
    n_seeds = pc.count_distinct(own["seed"]).as_py()
    return np.asarray(own[name], np.float64).reshape(n_seeds, -1)
