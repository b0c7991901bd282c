"""What came out of a training run: tables, files and a picture."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.ipc

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
    order = {policy: i for i, policy in enumerate(policies)}
    lines = sorted(lines, key=lambda x: (order[x["policy"]], x["seed"], x["step"]))
    table = pa.Table.from_pylist(lines)
    with pa.ipc.new_file(str(out / "steps.arrow"), table.schema) as file:
        file.write_table(table)
    (out / "reward.svg").write_text(draw(policies, lines), encoding="utf-8")
    first = [line for line in lines if line["step"] == 0]
    seeds = sorted({line["seed"] for line in lines})
    digests = {(line["seed"], line["digest"]) for line in first}
    summary = {
        "seeds": seeds,
        "steps": 1 + max(line["step"] for line in lines),
        "seconds": seconds,
        "warm_start": sorted(warm, key=lambda line: line["seed"]),
        # every policy began with the same rollouts
        "same_rollouts": len(digests) == len(seeds),
        "first_step": [_first_step(first, policy) for policy in policies],
        "training": [_training(lines, policy) for policy in policies],
        "files": [str(out / name) for name in ("steps.arrow", "reward.svg")],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary


def _first_step(first: Sequence[Line], policy: str) -> Line:
    """What a policy makes of the rollouts of the warm start, over all seeds."""
    own = [line for line in first if line["policy"] == policy]
    trained = sum(line["tokens_trained"] for line in own)
    off = sum(line["mismatch_mean"] * line["tokens_trained"] for line in own)
    return {
        "policy": policy,
        **{name: sum(line[name] for line in own) for name in _COUNTS},
        "mismatch_mean": off / trained,
        "mismatch_max": max(line["mismatch_max"] for line in own),
    }


def _training(lines: Sequence[Line], policy: str) -> Line:
    """How a policy's runs went: means over seeds, sums over seeds and steps."""
    own = [line for line in lines if line["policy"] == policy]
    n_steps = 1 + max(line["step"] for line in own)
    runs = [
        [line for line in own if line["seed"] == seed]
        for seed in sorted({line["seed"] for line in own})
    ]

    def mean(name: str, start: int, stop: int) -> list[float]:
        parts = [[line[name] for line in run[max(start, 0) : stop]] for run in runs]
        return [sum(part) / len(part) for part in parts]

    last = mean("reward", n_steps - _LAST, n_steps)
    middle = mean("reward", n_steps // 2 - _LAST // 2, n_steps // 2 + _LAST // 2 + 1)
    return {
        "policy": policy,
        "reward_first": sum(mean("reward", 0, 1)) / len(runs),
        "reward_middle": sum(middle) / len(runs),
        "reward_last": sum(last) / len(runs),
        "reward_last_per_seed": last,
        "thinking_first": sum(mean("thinking", 0, 1)) / len(runs),
        "thinking_last": sum(mean("thinking", n_steps - _LAST, n_steps)) / len(runs),
        **{name: sum(line[name] for line in own) for name in _COUNTS},
        "mismatch_max": max(line["mismatch_max"] for line in own),
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


def draw(policies: Sequence[str], lines: Sequence[Line]) -> str:
    """Reward over steps as SVG: a thin line per seed, a thick one for their mean."""
    width, height, left, top = 560, 260, 44, 14
    n_steps = 1 + max(line["step"] for line in lines)

    def path(rewards: Sequence[float], style: str) -> str:
        points = " ".join(
            f"{left + width * step / max(n_steps - 1, 1):.1f},"
            f"{top + height * (1 - reward):.1f}"
            for step, reward in enumerate(rewards)
        )
        return f'<polyline points="{points}" fill="none" {style}/>'

    def parts() -> Iterator[str]:
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = top + height * (1 - tick)
            yield f'<path d="M{left} {y}h{width}" stroke="#d8dee4"/>'
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick}</text>'
        for step in range(0, n_steps, 5):
            x = left + width * step / max(n_steps - 1, 1)
            y = top + height + 18
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>'
        for i, policy in enumerate(policies):
            color = f'stroke="{_COLORS[i % len(_COLORS)]}"'
            runs: dict[int, list[float]] = {}
            for line in lines:
                if line["policy"] == policy:
                    runs.setdefault(line["seed"], []).append(line["reward"])
            for rewards in runs.values():
                yield path(rewards, f'{color} stroke-opacity="0.3"')
            means = [sum(step) / len(step) for step in zip(*runs.values(), strict=True)]
            yield path(means, f'{color} stroke-width="2.5"')
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
