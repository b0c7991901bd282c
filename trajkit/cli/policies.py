"""Policies as options, ``--policy NAME --set CHOICE=VALUE``, and the list of them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, get_origin, get_type_hints

from cyclopts import Parameter, Token

import trajkit as tk
from trajkit.cli.options import Json, print_result
from trajkit.cli.screen import text_table
from trajkit.errors import ArgumentError, PolicyError
from trajkit.policies import (
    ALIASES,
    IN_OTHER_WORDS,
    NAMED_CHOICES,
    PRESETS,
    RULES,
    rule_of,
)

_HINTS = {k: hint for k, hint in get_type_hints(tk.Policy).items() if k != "name"}
_WORDS = {"true": True, "false": False, "none": None}
_HELP = (
    f"one of {', '.join([*PRESETS, *ALIASES])}; --set CHOICE=VALUE changes a choice of it "
    "(`trajkit policies NAME` lists them), and --fork-threshold K is short for --set "
    "fork_threshold=K"
)


def _texts(_: object, tokens: Sequence[Token]) -> list[str]:
    """The options as texts for `policy_of`; choices before any policy have no name."""
    texts: list[str] = []
    for token in tokens:
        if token.keyword == "--policy" or not texts:
            texts.append("")
        if token.keyword == "--policy":
            texts[-1] = token.value
        else:
            short = token.keyword == "--fork-threshold"
            texts[-1] += f" {'fork_threshold=' * short}{token.value}"
    return texts


_OPTIONS = Parameter(
    name=("--policy", "--set", "--fork-threshold"),
    converter=_texts,
    negative=(),
    allow_leading_hyphen=False,
)

PolicyOption = Annotated[
    list[str] | None, _OPTIONS, Parameter(help=f"{_HELP} (default: faithful)")
]

PoliciesOption = Annotated[
    list[str] | None,
    _OPTIONS,
    Parameter(
        help=f"{_HELP}. May be repeated; --set and --fork-threshold belong to the --policy "
        "before them (default: all policies)"
    ),
]


def policy_of(text: str) -> tk.Policy:
    """The policy of ``"NAME CHOICE=VALUE ..."``, each choice of which has an effect."""
    name, *sets = text.split() or [""]
    choices: dict[str, object] = {"name": name}
    for one in sets:
        choice, equals, value = one.partition("=")
        if not (choice and equals):
            raise ArgumentError(f"--set {one!r}: expected CHOICE=VALUE")
        if choice in choices:
            raise PolicyError(f"policy {name!r}, {one}: {choice} is given twice")
        choices[choice] = _value(choice, value)
    policy: tk.Policy = tk.policy(**choices)  # type: ignore[arg-type]
    if "fork_threshold" in choices and not _forks(policy):
        raise PolicyError(
            f"policy {policy.name!r} ignores fork_threshold: leave it out, or take slime, "
            "trl or miles, which use it"
        )
    return policy


def _value(choice: str, text: str) -> object:
    if get_origin(_HINTS.get(choice)) is tuple:
        return tuple(filter(None, text.split(",")))
    if text in NAMED_CHOICES.get(choice, ()):
        return text
    return int(text) if text.lstrip("-").isdigit() else _WORDS.get(text, text)


def _forks(policy: tk.Policy) -> bool:
    """Whether the policy uses ``fork_threshold``."""
    return policy.merge_rewrites or policy.absorbs_short


def one_policy(texts: list[str] | None) -> tk.Policy:
    """The only policy of the options, faithful by default."""
    first, *others = texts or ["faithful"]
    if first.startswith(" "):  # choices before the policy are its choices, too
        name, *others = others or ["faithful"]
        first = name + first
    if others:
        n = len(others) + 1
        raise ArgumentError(f"--policy is given {n} times: this takes one")
    return policy_of(first)


def maybe_policy(texts: list[str] | None) -> tk.Policy | None:
    """The policy of the options; None without them."""
    if texts and texts[-1].startswith(" "):
        raise ArgumentError("--set and --fork-threshold need --policy")
    return one_policy(texts) if texts else None


def many_policies(texts: list[str] | None) -> list[str]:
    """Texts for `policy_of`, which are valid; every preset by default.

    A fork threshold alone is for every preset that uses it.
    """
    texts = texts or [*PRESETS]
    if texts[0].startswith(" "):
        fork, *others = texts
        if others or any(not one.startswith("fork_threshold=") for one in fork.split()):
            raise ArgumentError(f"--set{fork} needs a --policy before it")
        texts = [k + fork * _forks(one) for k, one in PRESETS.items()]
    for text in texts:
        policy_of(text)
    return texts


def policies(
    policy: Annotated[str | None, Parameter(help="a policy")] = None,
    /,
    *,
    json: Json = False,
) -> None:
    """List the policies, or the choices of one.

    Policies are listed with the choices that differ from the defaults. With a POLICY, list
    all its choices, their values, what --set accepts, and what the policy does. on_drift is
    what happens to a row when the next prompt departs from its path.
    """
    chosen = [tk.policy(name) for name in (PRESETS if policy is None else [policy])]
    text = _choices(chosen[0]) if policy is not None else _presets()
    print_result([asdict(one) for one in chosen], text, json)


def _presets() -> str:
    """Each preset with the choices in which it differs from the defaults."""
    default = _written(tk.Policy(name="", parent_by="messages"))
    del default["parent_by"]
    lines = []
    for name, policy in PRESETS.items():
        aliases = [alias for alias, same in ALIASES.items() if same == policy]
        lines.append([", ".join([name, *aliases]), _differences(policy, default)])
    others = ", ".join(
        f"{alias} is {one.name} with {_differences(one, _written(PRESETS[one.name]))}"
        for alias, one in ALIASES.items()
        if one not in PRESETS.values()
    )
    drift = "\n".join(
        f"  {name}: {text.format(fork_threshold='fork_threshold')}"
        for name, text in RULES["on_drift"].items()
    )
    otherwise = ", ".join(f"{name}={value}" for name, value in default.items())
    table = text_table(["policy", "choices"], lines)
    return f"{table}\n\notherwise: {otherwise}\n\n{others}\n\non_drift\n{drift}"


def _choices(policy: tk.Policy) -> str:
    """Every choice of one policy, its value, and what it may be; and its rules in words."""
    values = _written(policy)
    # an option in the words of the policy's system sets choices below
    known = {name: [*one] for name, one in IN_OTHER_WORDS.get(policy.name, {}).items()}
    known |= {name: [*_allowed(name)] for name in _HINTS}
    lines = []
    for name, words in known.items():
        listed = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
        lines.append([name, values.get(name, ""), listed])
    rules = [f"{name}={values[name]}: {rule_of(policy, name)}" for name in RULES]
    table = text_table([policy.name, "is", "may be"], lines)
    return f"{table}\n\n" + "\n".join(rules)


def _allowed(choice: str) -> Iterator[str]:
    """What ``--set`` accepts for a choice."""
    hint = _HINTS[choice]
    if hint is bool:
        yield from ("true", "false")
    elif get_origin(hint) is tuple:
        yield "names, separated by commas"
    elif choice in NAMED_CHOICES:
        yield from NAMED_CHOICES[choice]
    else:
        yield from ["an integer"] if hint is int else ["an integer", "none"]


def _written(policy: tk.Policy) -> dict[str, str]:
    """Every choice of a policy and its value as ``--set`` accepts it."""
    return {name: _text(getattr(policy, name)) for name in _HINTS}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    word = value is None or isinstance(value, bool)
    return str(value).lower() if word else str(value)


def _differences(policy: tk.Policy, others: dict[str, str]) -> str:
    """The choices in which a policy differs from other ones."""
    own = _written(policy).items()
    return ", ".join(
        f"{name}={value}" for name, value in own if others.get(name) != value
    )
