"""Options that commands share."""

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
    """Add the file of turns, and ``--json``."""
    parser.add_argument(
        "source",
        metavar="IN",
        help="turns: Parquet, Arrow IPC or JSONL by suffix, or a directory of them; - is "
        "standard input",
    )
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def add_max_row_tokens(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-row-tokens``."""
    parser.add_argument(
        "--max-row-tokens",
        metavar="N",
        type=count,
        help="rows are truncated after N tokens",
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add ``--policy`` and its choices."""
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
        help="slime: a drifted reply of fewer than N tokens does not start a new row, nor "
        f"for trl drift of fewer than N (default: {DEFAULT_FORK_THRESHOLD}; 0: all drift "
        "does); miles: drift of N or more is refused (default: 1)",
    )


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for the one policy of a command."""
    parser.add_argument(
        "--set",
        metavar="CHOICE=VALUE",
        action="append",
        default=[],
        type=setting,
        help="change a choice of the policy; may be repeated (`trajkit policies NAME` "
        "lists the choices and their values)",
    )


def chosen_policy(arguments: argparse.Namespace) -> tk.Policy:
    """The policy of the options, with its choices.

    Raises
    ------
    PolicyError
        It or a choice does not exist, or it ignores the fork threshold.
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
    """The named policy with changed choices.

    Raises
    ------
    PolicyError
        It or a choice does not exist, or it ignores the fork threshold, which
        ``option`` sets.
    """
    policy = with_choices(tk.policy(name), sets)
    threshold = dict(sets).get("fork_threshold")
    if threshold is not None and not (policy.merge_rewrites or policy.absorbs_short):
        raise tk.errors.PolicyError(
            f"{option}{threshold}: policy {policy.name!r} ignores fork_threshold. Leave it "
            "out, or take a policy that uses it: slime, trl or miles"
        )
    return policy


def add_policies(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--policy`` and ``--set``, which may be repeated, as a list of policies."""
    parser.add_argument("--policy", metavar="NAME", action=_NamePolicy, help=help)
    parser.add_argument(
        "--set",
        metavar="CHOICE=VALUE",
        action=_SetChoice,
        dest="policy",
        type=setting,
        help="change a choice of the policy before it; may be repeated",
    )


class _NamePolicy(argparse.Action):
    """A repeatable ``--policy``: appends its name and a list for its choices."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*before, (values, [])])


class _SetChoice(argparse.Action):
    """A ``--set`` for the ``--policy`` before it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        named = getattr(namespace, self.dest)
        if not named:
            raise argparse.ArgumentError(self, "needs a --policy before it")
        named[-1][1].append(values)


def add_facts(parser: argparse.ArgumentParser, *, reward: bool) -> None:
    """Add ``--sessions`` and, optionally, ``--reward`` as an alternative."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--sessions",
        metavar="FILE",
        help="a line per session: session_id, reward, group_id, error; Parquet, Arrow IPC "
        "or JSONL by suffix, or the directory of a run. A session with an error is not "
        "trained",
    )
    if reward:
        either.add_argument(
            "--reward", metavar="X", type=float, help="the reward of every session"
        )


def known_sessions(arguments: argparse.Namespace) -> pa.Table | None:
    """The table of ``--sessions``.

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
