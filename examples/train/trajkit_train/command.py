"""The command ``trajkit train-demo``. Torch is imported when it runs."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from trajkit_rollout.demo_command import first_free
from trajkit_shim.engine_options import Count, needs_extra
from trajkit_train.settings import POLICIES, Settings

_DEFAULT = Settings()


def train_demo(
    *,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    steps: Count = _DEFAULT.steps,
    seeds: Count = 3,
    seed: int = 0,
    policy: list[str] | None = None,
    tasks: Count = _DEFAULT.tasks,
    samples: Count = _DEFAULT.samples,
    prompts: Literal["render", "append"] = "render",
    width: Count = _DEFAULT.width,
    layers: Count = _DEFAULT.layers,
    learning_rate: float = _DEFAULT.learning_rate,
    pack_tokens: Count = _DEFAULT.pack_tokens,
    device: str = _DEFAULT.device,
    jobs: Count | None = None,
    json: bool = False,
) -> int:
    """Watch a small model learn from what its agent did.

    Train a small model in a loop: an agent with tools calls it through the gateway, the
    recorded turns become rows and tree packs, and the new weights go back through the
    gateway. The same seeds are trained under several policies. Prints tables, and writes
    steps.arrow, summary.json and reward.svg.

    Parameters
    ----------
    out
        Directory of the run (default: the first free one of runs/train, runs/train-2, ...).
    steps
        Optimizer steps, each on rollouts of its own.
    seeds
        Number of seeds.
    seed
        The first seed.
    policy
        A policy to train under; repeat it for several (default: those of the README).
    tasks
        Tasks per step.
    samples
        Rollouts per task.
    prompts
        How the gateway builds prompts, as for serve.
    width
        Of the model.
    layers
        Of the model.
    learning_rate
        Of the loop.
    pack_tokens
        Tokens of a pack (take more on a GPU).
    device
        Torch device of model and engine.
    jobs
        Runs at the same time, a process each (default: one per core, or one on a GPU).
    json
        Print only one JSON object.
    """
    given = dict(locals())
    with needs_extra("train"):
        from trajkit_train.run import run_train

    names = {field.name for field in fields(Settings)}
    return run_train(
        out or first_free(Path("runs/train")),
        Settings(**{name: given[name] for name in given.keys() & names}),
        policies=policy or POLICIES,
        seeds=range(seed, seed + seeds),
        jobs=jobs,
        json=json,
    )
