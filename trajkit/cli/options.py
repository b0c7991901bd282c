"""Options that several commands share."""

import argparse
from typing import TypeAlias

import trajkit as tk
from trajkit.policies import DEFAULT_FORK_THRESHOLD, PRESETS

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def count(text: str) -> int:
    """A number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the file that the turns are read from, and ``--json``."""
    parser.add_argument(
        "source",
        metavar="IN",
        help="turns: Parquet, Arrow IPC or JSONL by suffix, or a directory of them",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add ``--policy`` and the choices within one."""
    parser.add_argument(
        "--policy",
        metavar="NAME",
        default="faithful",
        help=f"one of {', '.join(PRESETS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--fork-threshold",
        metavar="N",
        type=int,
        help="slime: a reply shorter than N tokens, trl: drift of fewer than N, goes on "
        "in the row whose last reply drifted; 0 and below: none does (default: "
        f"{DEFAULT_FORK_THRESHOLD})",
    )


def chosen_policy(arguments: argparse.Namespace) -> tk.Policy:
    """The policy that the options name.

    Raises
    ------
    PolicyError
        It does not exist, or ``--fork-threshold`` means nothing to it.
    """
    policy = tk.policy(arguments.policy, fork_threshold=arguments.fork_threshold)
    if arguments.fork_threshold is not None and not (
        policy.merge or policy.absorbs_short
    ):
        raise tk.PolicyError(
            f"--fork-threshold {arguments.fork_threshold}: policy {policy.name!r} "
            "does with all drift the same"
        )
    return policy
