"""Policies as options, ``--policy NAME --set CHOICE=VALUE``, and the list of them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, get_origin, get_type_hints

from cyclopts import Parameter, Token

import trajkit as tk
from trajkit.cli import options as opt
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
_HELP = (
    f"one of {', '.join([*PRESETS, *ALIASES])}; --set CHOICE=VALUE changes a choice of it "
    "(`trajkit policies NAME` lists them), and --fork-threshold K is short for --set "
    "fork_threshold=K"
)


def _texts(_: object, tokens: Sequence[Token]) -> list[str]:
    """The options as texts for `policy_of`; choices before any policy have no name."""
    texts: list[str] = []
    for token in tokens:
        if token.keyword == "--policy":
            texts.append(token.value)
        else:
            short = "fork_threshold=" * (token.keyword == "--fork-threshold")
            texts = texts or [""]
            texts[-1] += f" {short}{token.value}"
    return texts


_OPTIONS = Parameter(
    name=("--policy", "--set", "--fork-threshold"),
    converter=_texts,
    negative=(),
    allow_leading_hyphen=False,
    help=f"{_HELP} (default: faithful)",
)
_MANY = (
    f"{_HELP}. May be repeated; --set and --fork-threshold belong to the --policy before "
    "them (default: all policies)"
)
PolicyOption = Annotated[list[str] | None, _OPTIONS]
PoliciesOption = Annotated[list[str] | None, _OPTIONS, Parameter(help=_MANY)]


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
    if text.lstrip("-").isdigit():
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text, text)


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
    """Texts for `policy_of`, every preset by default.

    A fork threshold alone is for every preset that uses it.
    """
    first, *others = texts or PRESETS
    if not first.startswith(" "):
        return [first, *others]
    if others or any(not one.startswith("fork_threshold=") for one in first.split()):
        raise ArgumentError(f"--set{first} needs a --policy before it")
    return [name + first * _forks(one) for name, one in PRESETS.items()]


def policies(
    policy: Annotated[str | None, Parameter(help="a policy")] = None,
    /,
    *,
    json: opt.Json = False,
) -> None:
    """List the policies, or the choices of one.

    Policies are listed with the choices that differ from the defaults. With a POLICY, list
    all its choices, their values, what --set accepts, and what the policy does.
    """
    if policy is not None:
        one = tk.policy(policy)
        opt.print_result([asdict(one)], _choices(one), json)
        return
    default = _written(tk.Policy(name="", parent_by="messages"))
    del default["parent_by"]
    lines = []
    for name, one in (PRESETS | ALIASES).items():
        changed = (f"{k}={v}" for k, v in _written(one).items() if default.get(k) != v)
        lines.append([name, ", ".join(changed)])
    otherwise = ", ".join(f"{name}={value}" for name, value in default.items())
    text = f"{text_table(['policy', 'choices'], lines)}\n\notherwise: {otherwise}"
    opt.print_result([*map(asdict, PRESETS.values())], text, json)


def _choices(policy: tk.Policy) -> str:
    """Every choice of one policy, its value, and what it may be; and its rules in words."""
    values = _written(policy)
    # an option in the words of the policy's system sets choices below
    known = {name: [*one] for name, one in IN_OTHER_WORDS.get(policy.name, {}).items()}
    texts: dict[Any, list[str]] = {bool: ["true", "false"], int: ["an integer"]}
    texts[int | None] = ["an integer", "none"]
    for name, hint in _HINTS.items():
        named = NAMED_CHOICES.get(name, ["names, separated by commas"])
        known[name] = texts.get(hint, [*named])
    lines = [
        [name, values.get(name, ""), ", ".join(own)] for name, own in known.items()
    ]
    rules = [f"{name}={values[name]}: {rule_of(policy, name)}" for name in RULES]
    table = text_table([policy.name, "is", "may be"], lines)
    return "\n".join([table, "", *rules])


def _written(policy: tk.Policy) -> dict[str, str]:
    """Every choice of a policy and its value as ``--set`` accepts it."""
    values = {name: getattr(policy, name) for name in _HINTS}
    return {
        name: ",".join(one) if isinstance(one, tuple) else str(one).lower()
        for name, one in values.items()
    }
