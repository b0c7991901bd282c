"""The command ``trajkit demo``.

Its dependencies come with an extra, and are imported when it runs.
"""

import argparse
import itertools
from importlib.util import find_spec
from pathlib import Path

from trajkit.cli.options import Commands, add_options
from trajkit_shim import engine_options as options


def add_demo(commands: Commands) -> None:
    """Add ``demo`` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="watch real agents being recorded and turned into training rows",
        description="Run coding agents against the gateway on the embedded engine, "
        "each in a scratch git repository. Write their turns and the rows of every "
        "policy, and print what drifted and what each policy trains, loses and costs. "
        "The exit code is 1 if an agent failed.",
    )
    add_options(
        parser,
        """
-o --out RUN  directory of the run (default: the first free one of runs/demo, runs/demo-2,
    ...)
--sessions N 4  number of concurrent agents (default: %(default)s)
--seed SEED  of the engine; random by default
--json  print only one JSON object
""",
        out={"type": Path},
    )
    parser.set_defaults(run=lambda arguments: _demo(parser, arguments))


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    with options.needs_extra(parser, "demo"):
        # the agents are separate processes, which would report it late
        if find_spec("minisweagent") is None:
            raise ModuleNotFoundError(name="minisweagent")
        from trajkit_rollout.demo import run_demo
    out = arguments.out or first_free(Path("runs/demo"))
    return run_demo(
        out, sessions=arguments.sessions, seed=arguments.seed, json=arguments.json
    )


def first_free(path: Path) -> Path:
    """The path, or the first free one with a number appended."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())
