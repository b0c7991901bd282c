"""The command ``python -m trajkit_train``."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from trajkit_train.run import run_train
from trajkit_train.settings import POLICIES, Settings


def main(argv: list[str] | None = None) -> int:
    """Train a small model under several policies, and write what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m trajkit_train",
        description="Train a small model in a loop: an agent with tools calls it "
        "through the gateway, the recorded turns become rows and tree packs, and the "
        "new weights go back through the gateway. The same seeds are trained under "
        "several policies. Prints tables, and writes steps.arrow, summary.json and "
        "reward.svg.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Settings()
    add = parser.add_argument
    add("-o", "--out", type=Path, default=Path("runs/train"), help="a new directory")
    add("--seeds", type=int, default=3, help="number of seeds")
    add("--seed", type=int, default=0, help="the first seed")
    add("--policy", action="append", help="a policy to train under; may be repeated")
    add("--jobs", type=int, help="runs at the same time, a process each")
    add("--json", action="store_true", help="print only one JSON object")
    for name, help in (
        ("steps", "optimizer steps, each on rollouts of its own"),
        ("tasks", "tasks per step"),
        ("samples", "rollouts per task"),
        ("width", "of the model"),
        ("layers", "of the model"),
        ("learning_rate", "of the loop"),
        ("pack_tokens", "tokens of a pack; take more on a GPU"),
        ("device", "torch device of model and engine"),
        ("prompts", "how the gateway builds prompts: render or append"),
    ):
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        add(option, type=type(value), default=value, help=help)
    given = vars(parser.parse_args(argv))
    return run_train(
        given["out"],
        Settings(
            **{f.name: given[f.name] for f in fields(Settings) if f.name in given}
        ),
        policies=given["policy"] or POLICIES,
        seeds=range(given["seed"], given["seed"] + given["seeds"]),
        jobs=given["jobs"],
        json=given["json"],
    )


if __name__ == "__main__":
    sys.exit(main())
