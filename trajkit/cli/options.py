"""Options that several commands share."""

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias, get_args

import pyarrow as pa

import trajkit as tk
from trajkit.cli.policy_args import Set, setting, with_choices
from trajkit.policies import DEFAULT_FORK_THRESHOLD, PRESETS
from trajkit.training.row_weights import By

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
        help="turns: Parquet, Arrow IPC or JSONL by suffix, or a directory of them; - is "
        "standard input",
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
        help=f"one of {', '.join(PRESETS)} (default: %(default)s); `trajkit policies` "
        "lists their choices",
    )
    add_set(parser)
    parser.add_argument(
        "--fork-threshold",
        metavar="N",
        type=int,
        help="slime: a reply shorter than N tokens, trl: drift of fewer than N, goes on "
        "in the row whose last reply drifted; 0 and below: none does (default: "
        f"{DEFAULT_FORK_THRESHOLD}); miles: drift of N or more is refused (default: 1)",
    )


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for the one policy of a command."""
    parser.add_argument(
        "--set",
        metavar="CHOICE=VALUE",
        action="append",
        default=[],
        type=setting,
        help="make a choice of the policy otherwise; may be repeated (`trajkit policies "
        "NAME` lists the choices and what each may be)",
    )


def chosen_policy(arguments: argparse.Namespace) -> tk.Policy:
    """The policy that the options name.

    Raises
    ------
    PolicyError
        It or a choice does not exist, or the fork threshold means nothing to it.
    """
    sets = list(arguments.set)
    option = "--set fork_threshold="
    if arguments.fork_threshold is not None:
        sets.append(("fork_threshold", str(arguments.fork_threshold)))
        option = "--fork-threshold "
    return checked_policy(arguments.policy, sets, option)


def checked_policy(
    name: str, sets: Sequence[Set], option: str = "--set fork_threshold="
) -> tk.Policy:
    """The named policy with choices made otherwise.

    Raises
    ------
    PolicyError
        It or a choice does not exist, or the fork threshold, which ``option`` sets,
        means nothing to it.
    """
    policy = with_choices(tk.policy(name), sets)
    threshold = dict(sets).get("fork_threshold")
    if threshold is not None and not (policy.merge_rewrites or policy.absorbs_short):
        raise tk.errors.PolicyError(
            f"{option}{threshold}: policy {policy.name!r} ignores fork_threshold. Leave it "
            "out, or take a policy that uses it: slime, trl or miles"
        )
    return policy


class NamePolicy(argparse.Action):
    """A ``--policy`` of several: its name, and room for its choices."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*before, (values, [])])


class SetChoice(argparse.Action):
    """A ``--set`` of several policies: of the one named before it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        named = getattr(namespace, self.dest)
        if not named:
            raise argparse.ArgumentError(
                self, "comes after the --policy whose choice it is"
            )
        named[-1][1].append(values)


def add_facts(parser: argparse.ArgumentParser, *, reward: bool) -> None:
    """Add ``--sessions`` and, if asked for, ``--reward`` as the other way."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--sessions",
        metavar="FILE",
        help="what is known of each session: session_id, reward, group_id, error; "
        "Parquet, Arrow IPC or JSONL by suffix, or the directory of a run. A session "
        "with an error trains nothing",
    )
    if reward:
        either.add_argument(
            "--reward", metavar="X", type=float, help="the reward of every session"
        )


def known_sessions(arguments: argparse.Namespace) -> pa.Table | None:
    """The table that ``--sessions`` names.

    Raises
    ------
    FormatError, SchemaError
        As `trajkit.read_sessions`.
    """
    if arguments.sessions is None:
        return None
    return tk.read_sessions(arguments.sessions)


def add_weigh_by(parser: argparse.ArgumentParser) -> None:
    """Add ``--weigh-by``."""
    parser.add_argument(
        "--weigh-by",
        choices=get_args(By),
        default="token",
        help="row_weight: the row's trained tokens over the rollout's N; 1 over the "
        "rollout's rows that train; or 1 / N (default: %(default)s)",
    )
