"""Commands and their options, and the options that several commands have."""

import argparse
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pyarrow as pa

import trajkit as tk
from trajkit.cli.policy_args import Set, setting, with_choices
from trajkit.errors import LeftOutWarning
from trajkit.io.group import Log
from trajkit.io.sources import Paths, SessionPrefix
from trajkit.io.tables import sessions_below
from trajkit.learn.weights import By
from trajkit.policies import DEFAULT_FORK_THRESHOLD, PRESETS
from trajkit.turns.validation import reject_turns

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], int | None]
"""A function of the parsed arguments; it returns the exit code, or None for 0."""


def port(text: str) -> int:
    """A port number; 0 is any free one."""
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is not a port: expected 0 to 65535")
    return number


def count(text: str) -> int:
    """A number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


_TYPES: dict[str, Callable[[str], object]] = {
    "N": count,
    "K": int,
    "PORT": port,
    "SEED": int,
    "X": float,
    "RATE": float,
    "SECONDS": float,
    "PATH": Path,
    "DIR": Path,
    "CHOICE=VALUE": setting,
}
"""Types of option values, by their metavar."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command; see `command`."""

    name: str
    usage: str
    run: Run
    extend: Callable[[argparse.ArgumentParser], None] | None
    writes: str | None
    details: Mapping[str, dict[str, Any]]

    def add(self, commands: Commands) -> argparse.ArgumentParser:
        """Add it to the command line."""
        help, description, *table = self.usage.strip().split("\n\n")
        words = " ".join(description.split())
        parser = commands.add_parser(self.name, help=help, description=words)
        for options in table:
            add_options(parser, options, **self.details)
        if self.extend is not None:
            self.extend(parser)
        if self.writes is not None:
            add_options(parser, "--no-clobber  replace no existing file")
        parser.set_defaults(run=self.run, writes=self.writes)
        return parser


def command(
    name: str,
    usage: str,
    *,
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
    writes: str | None = None,
    **details: dict[str, Any],
) -> Callable[[Run], Command]:
    """Make a function of the parsed arguments a command.

    ``usage`` is the help in one line, a paragraph that describes the command, and a table
    of its options (see `add_options`), with blank lines between them. ``extend`` adds to
    the parser what is no plain option. ``writes`` is the kind of table, or of file, that
    goes to ``--out``; None: nothing is written.
    """
    return lambda run: Command(name, usage, run, extend, writes, details)


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    table: str,
    **details: dict[str, Any],
) -> None:
    """Add the options of a table.

    An entry has the flags of an option and the name of its value as in a usage line, two
    spaces, and its help, which indented lines continue. Without flags it is a positional
    argument, and ``NAME...`` takes several values. After the name there may be a default.
    ``NAME!`` is required, an option's ``NAME...`` may be repeated. ``{a,b}`` are choices,
    of which the first is the default. A line without help lists options of `_SHARED`:
    ``--policy, --set``.

    ``details`` are further keywords of ``add_argument``, by the option's last flag. An
    option with neither a value nor keywords is a switch.
    """
    for entry, help in _entries(table):
        for name in () if help else entry.split(", "):
            _add_option(parser, *_SHARED[name], **_SHARED_DETAILS.get(name, {}))
            if name == "source":
                for also in ("--session-prefix", "--nonfinite-logprobs"):
                    own = _SHARED_DETAILS.get(also, {})
                    _add_option(parser, *_SHARED[also], **own)
        if help:
            key = _flags(entry)[-1].lstrip("-").replace("-", "_")
            key += "_" * iskeyword(key)
            _add_option(parser, entry, help, **details.get(key, {}))


def _entries(table: str) -> Iterator[tuple[str, str]]:
    """The flags and the help of each entry of a table."""
    for entry in re.split(r"\n(?=\S)", table.strip()):
        spec, _, help = entry.partition("  ")
        yield spec, " ".join(help.split())


def _flags(spec: str) -> list[str]:
    """The flags of an option, or the name of an argument."""
    first, *rest = spec.split()
    return [first, *(word for word in rest if word.startswith("-"))]


def _add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    spec: str,
    help: str,
    **details: Any,
) -> None:
    flags = _flags(spec)
    value, default = (*spec.split()[len(flags) :], None, None)[:2]
    own: dict[str, Any]
    if value is None:
        own = {} if details else {"action": "store_true"}
    elif value.startswith("{"):
        choices = value.strip("{}").split(",")
        own = {"choices": choices, "default": choices[0]}
    elif value.endswith("...") and not flags[0].startswith("-"):
        own = {"metavar": value[:-3], "nargs": "+"}
    elif value.endswith("..."):
        own = {"metavar": value[:-3], "type": _TYPES.get(value[:-3])}
        own |= {"action": "append", "default": []}
    else:
        required, value = (
            {"required": True} if value[-1] == "!" else {},
            value.strip("!"),
        )
        type_ = _TYPES.get(value)
        own = {"metavar": value, "type": type_, "default": default, **required}
    parser.add_argument(*flags, help=help, **{**own, **details})


_BY = ",".join(get_args(By))
_SHARED: dict[str, tuple[str, str]] = {
    _flags(spec)[0]: (spec, help)
    for spec, help in _entries(f"""
source IN...        turns: Parquet, Arrow IPC or JSON by suffix, directories of them, or
                    patterns; - is standard input
--session-prefix WHAT  put the path of its file, or of its folder, before each session id,
                    where files number their sessions alike; no: files with one id continue
                    one another (default: calls that start over in another file are an
                    error)
--nonfinite-logprobs {{raise,null}}  invalid logprobs (NaN, -9999): an error, or null
                    (default: %(default)s)
--json              print one JSON object and nothing else
--max-row-tokens N  rows are truncated after N tokens
--policy NAME faithful  one of {", ".join(PRESETS)} (default: %(default)s);
                    `trajkit policies` lists their choices
--set CHOICE=VALUE...  change a choice of the policy; may be repeated (`trajkit policies
                    NAME` lists the choices and their values)
--fork-threshold K  slime: a drifted reply of fewer than K tokens does not start a new row,
                    nor for trl drift of fewer than K (default: {DEFAULT_FORK_THRESHOLD}; 0:
                    all drift does); miles: drift of K or more is refused (default: 1)
--sessions FILE     a line per session: session_id, reward, group_id, error; Parquet, Arrow
                    IPC or JSONL by suffix, or the directory of a run. A session with an
                    error is not trained
--reward X          the reward of every session
--weigh-by {{{_BY}}}  row_weight: the row's trained tokens over the rollout's N; 1 over
                    the rollout's rows that train; or 1 / N (default: %(default)s)
--gather {{auto,no}}  auto: group scattered sessions through temporary files (next to OUT,
                    if there is one); no: refuse them (default: %(default)s)
--rejected FILE     leave out sessions that break a rule, and write them to FILE with the
                    reason (default: the first one is an error)
--tokenizer PATH    the model's tokenizer.json, or its directory (default: that in the
                    directory of the run)
--session ID        a single session (default: all of them)
""")
}
"""Flags and help of the options that several commands have, by their first flag."""

_SHARED_DETAILS: dict[str, dict[str, Any]] = {
    "--session-prefix": {"choices": get_args(SessionPrefix), "metavar": None}
}


def add_facts(parser: argparse.ArgumentParser) -> None:
    """Add ``--sessions``, and ``--reward`` as an alternative."""
    add_options(parser.add_mutually_exclusive_group(), "--sessions, --reward")


def chosen_policy(arguments: argparse.Namespace) -> tk.Policy:
    """The policy of the options, with its choices."""
    sets = list(arguments.set)
    option = "--set fork_threshold="
    if arguments.fork_threshold is not None:
        sets.append(("fork_threshold", str(arguments.fork_threshold)))
        option = "--fork-threshold "
    return checked_policy(arguments.policy, sets, option)


def checked_policy(
    name: str, sets: Sequence[Set], option: str = "--set fork_threshold="
) -> tk.Policy:
    """The named policy with changed choices; ``option`` sets the fork threshold."""
    policy = with_choices(tk.policy(name), sets)
    threshold = dict(sets).get("fork_threshold")
    if threshold is not None and not _forks(policy):
        raise tk.errors.PolicyError(
            f"{option}{threshold}: policy {policy.name!r} ignores fork_threshold. Leave it "
            "out, or take a policy that uses it: slime, trl or miles"
        )
    return policy


def add_policies(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--policy`` and ``--set``, which may be repeated, as a list of policies."""
    add_options(
        parser,
        f"""
--policy NAME       {help}
--set CHOICE=VALUE  change a choice of the policy before it; may be repeated
--fork-threshold K  of the policy before it, or without one of every policy that uses it;
                    see `trajkit linearize --help`
""",
        policy={"action": _Repeated},
        set={"action": _Repeated, "dest": "policy", "type": setting},
        fork_threshold={"action": _Threshold},
    )


def chosen_policies(arguments: argparse.Namespace) -> list[tk.Policy] | None:
    """The policies of `add_policies`; None for every preset as it is."""
    if arguments.policy:
        return [checked_policy(*one) for one in arguments.policy]
    if arguments.fork_threshold is None:
        return None
    presets = list(PRESETS.values())
    sets = [("fork_threshold", str(arguments.fork_threshold))]
    return [checked_policy(one.name, sets) if _forks(one) else one for one in presets]


def _forks(policy: tk.Policy) -> bool:
    """Whether the policy uses ``fork_threshold``."""
    return policy.merge_rewrites or policy.absorbs_short


class _Repeated(argparse.Action):
    """Collects names of policies from ``--policy``, each with its values of ``--set``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        named = getattr(namespace, self.dest) or []
        if "--policy" in self.option_strings:
            setattr(namespace, self.dest, [*named, (values, [])])
        elif named:
            named[-1][1].append(values)
        else:
            raise argparse.ArgumentError(self, "needs a --policy before it")


class _Threshold(argparse.Action):
    """Sets ``fork_threshold`` of the policy before it, or of all."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        named = namespace.policy
        if named:
            named[-1][1].append(("fork_threshold", str(values)))
        else:
            namespace.fork_threshold = values


def known_sessions(
    file: str | None, run: Paths | None = None, prefix: SessionPrefix | None = None
) -> pa.Table | None:
    """The table of sessions in a file, else that in the directory of a run."""
    if file is not None:
        return tk.read_sessions(file)
    return None if run is None else sessions_below(run, prefix)


def read_turns(arguments: argparse.Namespace) -> pa.Table:
    """The turns of ``arguments.source``, without sessions that break a rule.

    Those are reported on stderr. No calls, and no valid session, are errors.
    """
    found = list(turn_pieces(arguments.source, arguments))
    return pa.concat_tables(found, promote_options="default")


def turn_pieces(
    source: Paths, arguments: argparse.Namespace, *, empty: bool = False
) -> Iterator[pa.Table]:
    """`read_turns` in tables of complete sessions. With ``empty``, there may be no call."""
    log = Log(
        *(source, None, arguments.nonfinite_logprobs),
        reject=True,
        session_prefix=arguments.session_prefix,
    )
    index = log.index()
    if not index.n_turns and not empty:
        raise no_calls(source)
    n_good = 0
    rejected: list[dict[str, str]] = []
    for piece in log.pieces(index):
        good, bad = reject_turns(piece.turns, arguments.nonfinite_logprobs, bodies=True)
        rejected += [*piece.rejected.to_pylist(), *bad.to_pylist()]
        n_good += good.num_rows
        yield good
    for k, one in enumerate(rejected):
        reason = one["reason"]
        if k < _PLACED:
            reason = str(log.placed(tk.errors.InvalidTurnsError(reason)))
        if not n_good:
            raise tk.errors.InvalidTurnsError(reason)
        words = f"session {one['session_id']!r} is left out: {reason}"
        warnings.warn(words, LeftOutWarning, stacklevel=2)


# rejected sessions whose file and line are searched for
_PLACED = 10


def no_calls(source: Paths) -> tk.errors.InvalidTurnsError:
    """The error of an input without a call; a torn line gives its warning first."""
    with suppress(tk.TrajkitError):
        tk.read_turns(source)
    return nothing(source, "calls")


def read_rows(path: str) -> pa.Table:
    """The rows of a file or directory; no row at all is an error."""
    rows = tk.read_rows(path)
    if not rows.num_rows:
        raise nothing(path, "rows")
    return rows


def nothing(source: Paths, what: str) -> tk.errors.InvalidTurnsError:
    """The error of an input without a line."""
    names = ", ".join(map(str, source if isinstance(source, list) else [source]))
    return tk.errors.InvalidTurnsError(f"{names}: no {what}, nothing to do")
