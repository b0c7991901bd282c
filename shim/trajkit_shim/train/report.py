"""What came out of a training run: tables, files and a picture."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.feather

from trajkit.cli.text import share, text_table

Line: TypeAlias = dict[str, Any]

_COUNTS = (
    "rows",
    "tokens_sampled",
    "tokens_trained",
    "tokens_forward",
    "tokens_packed",
)
# the mean over the last steps is less noisy than the last one
_LAST = 5
_COLORS = ("#2f74c0", "#d1332e", "#2a8c4a", "#8a5cc2", "#c77d0a", "#57606a")


def summarise(
    out: Path,
    policies: Sequence[str],
    warm: Sequence[Line],
    lines: Sequence[Line],
    seconds: float,
) -> Line:
    """Write ``steps.arrow``, ``summary.json`` and ``reward.svg``; return the summary.

    ``warm`` has a line per seed, ``lines`` one per policy, seed and step.
    """
    lines = sorted(
        lines, key=lambda x: (policies.index(x["policy"]), x["seed"], x["step"])
    )
    table = pa.Table.from_pylist(lines)
    pyarrow.feather.write_feather(table, out / "steps.arrow", "uncompressed")
    runs = {name: [x for x in lines if x["policy"] == name] for name in policies}
    rewards = {name: _by_seed(own, "reward") for name, own in runs.items()}
    (out / "reward.svg").write_text(draw(rewards), encoding="utf-8")
    first = [line for line in lines if line["step"] == 0]
    seeds = sorted({line["seed"] for line in lines})
    digests = {(line["seed"], line["digest"]) for line in first}
    summary = {
        "seeds": seeds,
        "steps": len(lines) // len(first),
        "seconds": seconds,
        "warm_start": sorted(warm, key=lambda line: line["seed"]),
        # every policy began with the same rollouts
        "same_rollouts": len(digests) == len(seeds),
        "first_step": [
            _counted([line for line in own if line["step"] == 0])
            for own in runs.values()
        ],
        "training": [_training(own) for own in runs.values()],
        "files": [str(out / name) for name in ("steps.arrow", "reward.svg")],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary


def _by_seed(own: Sequence[Line], name: str) -> npt.NDArray[np.float64]:
    """A column of one policy's lines, of shape (seeds, steps)."""
    n_seeds = len({line["seed"] for line in own})
    return np.array([line[name] for line in own], np.float64).reshape(n_seeds, -1)


def _counted(own: Sequence[Line]) -> Line:
    """Sums and mismatch over some lines of one policy."""
    sums = {name: sum(line[name] for line in own) for name in _COUNTS}
    off = sum(line["mismatch_mean"] * line["tokens_trained"] for line in own)
    return {
        "policy": own[0]["policy"],
        **sums,
        "mismatch_mean": off / sums["tokens_trained"],
        "mismatch_max": max(line["mismatch_max"] for line in own),
    }


def _training(own: Sequence[Line]) -> Line:
    """How a policy's runs went: means over seeds, sums over seeds and steps."""
    reward, thinking = _by_seed(own, "reward"), _by_seed(own, "thinking")
    middle = reward.shape[1] // 2
    span = slice(max(middle - _LAST // 2, 0), middle + _LAST // 2 + 1)
    return {
        **_counted(own),
        "reward_first": reward[:, 0].mean(),
        "reward_middle": reward[:, span].mean(),
        "reward_last": reward[:, -_LAST:].mean(),
        "reward_last_per_seed": reward[:, -_LAST:].mean(1).tolist(),
        "thinking_first": thinking[:, 0].mean(),
        "thinking_last": thinking[:, -_LAST:].mean(),
        "seconds": sum(line["seconds"] for line in own),
    }


def describe(summary: Line) -> str:
    """Return the summary as tables for people."""
    warm = summary["warm_start"]
    scripted = sum(line["scripted_reward"] for line in warm) / len(warm)
    same = "the same for every policy" if summary["same_rollouts"] else "NOT the same"
    head = "policy", "rows", "trained", "of sampled", "forward", "as trees", "mismatch"
    first = [
        (
            *(line["policy"], line["rows"], line["tokens_trained"]),
            share(line["tokens_trained"], line["tokens_sampled"]),
            *(line["tokens_forward"], line["tokens_packed"]),
            f"{line['mismatch_mean']:.1e} (at most {line['mismatch_max']:.1e})",
        )
        for line in summary["first_step"]
    ]
    rewards = "policy", "first", "middle", "last", "per seed", "thinking", "trained"
    training = [
        (
            line["policy"],
            *(f"{line[f'reward_{when}']:.2f}" for when in ("first", "middle", "last")),
            " ".join(f"{reward:.2f}" for reward in line["reward_last_per_seed"]),
            f"{line['thinking_first']:.0%} to {line['thinking_last']:.0%}",
            *(line["tokens_trained"], line["tokens_forward"], line["tokens_packed"]),
        )
        for line in summary["training"]
    ]
    return "\n\n".join(
        [
            f"{summary['steps']} steps, seeds {', '.join(map(str, summary['seeds']))}, "
            f"{summary['seconds']:.0f} s. Reward of the scripted runs: {scripted:.2f}",
            f"First step, rollouts {same}: rows, tokens, and mismatch between recorded "
            "and recomputed logprobs in nats",
            text_table(head, first),
            f"Reward: first step, middle and last {_LAST} steps; share of replies with "
            "reasoning; tokens of all steps",
            text_table((*rewards, "forward", "as trees"), training),
            "\n".join(summary["files"]),
        ]
    )


def draw(rewards: Mapping[str, npt.NDArray[np.float64]]) -> str:
    """Reward over steps as SVG: a thin line per seed, a thick one for their mean.

    ``rewards`` has an array of shape (seeds, steps) for each policy.
    """
    width, height, left, top = 560, 260, 44, 14
    n_steps = max(run.shape[1] for run in rewards.values())
    xs = left + width * np.arange(n_steps) / max(n_steps - 1, 1)

    def path(run: npt.NDArray[np.float64], style: str) -> str:
        ys = top + height * (1 - run)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        return f'<polyline points="{points}" fill="none" {style}/>'

    def parts() -> Iterator[str]:
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = top + height * (1 - tick)
            yield f'<path d="M{left} {y}h{width}" stroke="#d8dee4"/>'
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick}</text>'
        y = top + height + 18
        for step in range(0, n_steps, 5):
            yield f'<text x="{xs[step]:.1f}" y="{y}" text-anchor="middle">{step}</text>'
        for i, (policy, runs) in enumerate(rewards.items()):
            color = f'stroke="{_COLORS[i % len(_COLORS)]}"'
            yield from (path(run, f'{color} stroke-opacity="0.3"') for run in runs)
            yield path(runs.mean(0), f'{color} stroke-width="2.5"')
            x, y = left + 110 * i, top + height + 42
            yield f'<path d="M{x} {y - 4}h20" {color} stroke-width="2.5"/>'
            yield f'<text x="{x + 26}" y="{y}">{escape(policy)}</text>'

    size = f"{left + width + 16} {top + height + 52}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">\n'
        "<title>Mean reward over optimizer steps</title>\n"
        "<style>text { font: 11px system-ui, sans-serif; fill: #24292f }</style>\n"
        '<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts())
        + "\n</svg>\n"
    )
