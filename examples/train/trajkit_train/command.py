"""The command ``trajkit train-demo``. Torch is imported when it runs."""

import argparse
from dataclasses import fields
from pathlib import Path

from trajkit.cli.options import Commands, add_options
from trajkit_rollout.demo_command import first_free
from trajkit_shim.engine_options import needs_extra
from trajkit_train.settings import POLICIES, Settings


def add_train_demo(commands: Commands) -> None:
    """Add ``train-demo`` to the command line."""
    parser = commands.add_parser(
        "train-demo",
        help="watch a small model learn from what its agent did",
        description="Train a small model in a loop: an agent with tools calls it "
        "through the gateway, the recorded turns become rows and tree packs, and the "
        "new weights go back through the gateway. The same seeds are trained under "
        "several policies. Prints tables, and writes steps.arrow, summary.json and "
        "reward.svg.",
    )
    default = Settings()
    add_options(
        parser,
        f"""
-o --out RUN  directory of the run (default: the first free one of runs/train, runs/train-2,
    ...)
--steps N {default.steps}  optimizer steps, each on rollouts of its own (default:
    %(default)s)
--seeds N 3  number of seeds (default: %(default)s)
--seed SEED 0  the first seed (default: %(default)s)
--policy NAME...  a policy to train under; repeat it for several (default:
    {", ".join(POLICIES)})
--tasks N {default.tasks}  tasks per step (default: %(default)s)
--samples N {default.samples}  rollouts per task (default: %(default)s)
--prompts {{render,append}}  how the gateway builds prompts, as for serve: render (the
    default here) or append
--width N {default.width}  of the model (default: %(default)s)
--layers N {default.layers}  of the model (default: %(default)s)
--learning-rate RATE {default.learning_rate}  of the loop (default: %(default)s)
--pack-tokens N {default.pack_tokens}  tokens of a pack (default: %(default)s; take more
    on a GPU)
--device NAME {default.device}  torch device of model and engine (default: %(default)s)
--jobs N  runs at the same time, a process each (default: one per core, or one on a GPU)
--json  print only one JSON object
""",
        out={"type": Path},
    )
    parser.set_defaults(run=lambda arguments: _train_demo(parser, arguments))


def _train_demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    with needs_extra(parser, "train"):
        from trajkit_train.run import run_train

    names, given = {field.name for field in fields(Settings)}, vars(arguments)
    return run_train(
        arguments.out or first_free(Path("runs/train")),
        Settings(**{key: given[key] for key in given.keys() & names}),
        policies=arguments.policy or POLICIES,
        seeds=range(arguments.seed, arguments.seed + arguments.seeds),
        jobs=arguments.jobs,
        json=arguments.json,
    )
