"""What came out of a training run: a line per policy, and a picture."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.figure import Figure

from trajkit.cli.screen import text_table

# the mean over the last steps is less noisy than the last one
LAST = 5


def compare(steps: pa.Table) -> list[dict[str, Any]]:
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


def draw(steps: pa.Table, path: Path) -> None:
    """Write reward over steps: a thin line per seed, a thick one for their mean."""
    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.subplots()
    for i, (policy, own) in enumerate(_by_policy(steps).items()):
        runs = _by_seed(own, "reward")
        axes.plot(runs.T, color=f"C{i}", alpha=0.3, linewidth=1)
        axes.plot(runs.mean(0), color=f"C{i}", linewidth=2.5, label=policy)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def described(summary: dict[str, Any]) -> str:
    """Return a run's summary for people."""
    same = "the same" if summary["same_rollouts"] else "NOT the same"
    warm = [line["scripted_reward"] for line in summary["warm_start"]]
    lines = summary["policies"]
    cells = [[_cell(value) for value in line.values()] for line in lines]
    return (
        f"{summary['seconds']:.0f} s. Reward of the scripted runs: "
        f"{sum(warm) / len(warm):.2f}\nFirst step, on rollouts that are {same} for every "
        "policy: rows, tokens, and mean mismatch\nbetween recorded and recomputed "
        f"logprobs in nats. Reward: first step, middle and last {LAST} steps.\n"
        "Share of replies with reasoning: first and last steps.\n\n"
        + text_table([name.replace("_", " ") for name in lines[0]], cells)
    )


def _by_policy(steps: pa.Table) -> dict[str, pa.Table]:
    names = pc.unique(steps["policy"]).to_pylist()
    return {name: steps.filter(pc.equal(steps["policy"], name)) for name in names}


def _by_seed(own: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """A column of one policy, of shape (seeds, steps)."""
    n_seeds = pc.count_distinct(own["seed"]).as_py()
    return np.asarray(own[name], np.float64).reshape(n_seeds, -1)


def _cell(value: Any) -> str | int:
    if isinstance(value, list):
        return " ".join(map(str, map(_cell, value)))
    return f"{value:.2g}" if isinstance(value, float) else value
