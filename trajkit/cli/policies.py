"""Policies and their choices as text: ``--policy NAME --set CHOICE=VALUE``.

And ``trajkit policies``, which lists them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Parameter, Token

import trajkit as tk
from trajkit._arguments import did_you_mean
from trajkit.cli.options import Json, print_json, print_text
from trajkit.cli.screen import text_table
from trajkit.errors import ArgumentError
from trajkit.policies import ALIASES, IN_OTHER_WORDS, PRESETS, RULES, rule_of

_NONE, _NAMES = "none", "names, separated by commas"

_HINTS: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(tk.Policy).items() if name != "name"
}

DEFAULTS = {
    field.name: field.default
    for field in fields(tk.Policy)
    if field.name in _HINTS and field.default is not MISSING
}
"""The default of each choice."""

_POLICY = (
    f"one of {', '.join([*PRESETS, *ALIASES])}; --set CHOICE=VALUE changes a choice of it "
    "(`trajkit policies NAME` lists them), and --fork-threshold K is short for --set "
    "fork_threshold=K: a drifted reply (slime), drift (trl) of fewer than K tokens starts "
    "no row, drift of K or more is refused (miles)"
)


def _words(_: object, tokens: Sequence[Token]) -> list[str]:
    """The options in their order, as `many_policies` takes them."""
    return [f"{token.keyword} {token.value}" for token in tokens]


_OPTIONS = Parameter(
    name=("--policy", "--set", "--fork-threshold"),
    converter=_words,
    negative=(),
    allow_leading_hyphen=False,
)

PolicyOption = Annotated[
    list[str] | None, _OPTIONS, Parameter(help=f"{_POLICY} (default: faithful)")
]

PoliciesOption = Annotated[
    list[str] | None,
    _OPTIONS,
    Parameter(
        help=f"{_POLICY}. May be repeated; --set and --fork-threshold belong to the "
        "--policy before them (default: all policies)"
    ),
]

Sets = list[tuple[str, str, str]]
"""Choices, each with its value as text and the option that set it."""


def _parsed(options: Iterable[str]) -> tuple[Sets, list[tuple[str, Sets]]]:
    """Choices before any policy, and policies by name with the choices after them."""
    loose: Sets = []
    named: list[tuple[str, Sets]] = []
    for option in options:
        flag, _, text = option.partition(" ")
        if flag == "--policy":
            named.append((text, []))
            continue
        name, equals, value = text.partition("=")
        if flag == "--fork-threshold":
            name, equals, value = "fork_threshold", "=", text
            if not text.lstrip("-").isdigit():
                raise ArgumentError(f"{flag} {text}: expected an integer")
        if not (name and equals):
            raise ArgumentError(f"{flag} {text!r}: expected CHOICE=VALUE")
        (named[-1][1] if named else loose).append((name, value, f"{flag} "))
    return loose, named


def one_policy(words: Iterable[str] | None) -> tk.Policy:
    """The only policy of the options, faithful by default."""
    loose, named = _parsed(words or [])
    if len(named) > 1:
        raise ArgumentError(f"--policy is given {len(named)} times: this takes one")
    name, sets = named[0] if named else ("faithful", [])
    return _checked(name, [*loose, *sets])


def maybe_policy(words: list[str] | None) -> tk.Policy | None:
    """The policy of the options; None without them."""
    if words is None:
        return None
    if not _parsed(words)[1]:
        raise ArgumentError("--set and --fork-threshold need --policy")
    return one_policy(words)


def many_policies(words: list[str] | None) -> list[tk.Policy] | None:
    """The policies of the options; None for every preset as it is.

    A fork threshold alone is for every preset that uses it.
    """
    if words is None:
        return None
    loose, named = _parsed(words)
    if named and loose:
        raise ArgumentError(f"{loose[0][2]}needs a --policy before it")
    if named:
        return [_checked(name, sets) for name, sets in named]
    if any(name != "fork_threshold" for name, _, _ in loose):
        raise ArgumentError("--set needs a --policy before it")
    return [
        _checked(one.name, loose) if _forks(one) else one for one in PRESETS.values()
    ]


def policy_of(text: str) -> tk.Policy:
    """The policy of ``"NAME CHOICE=VALUE ..."``."""
    name, *sets = text.split() or [""]
    return one_policy([f"--policy {name}", *(f"--set {one}" for one in sets)])


def text_of(words: list[str] | None) -> list[str]:
    """The policies of options as texts for `policy_of`; every preset without options."""
    named = many_policies(words) or PRESETS.values()
    return [" ".join([one.name, *differences(one)]) for one in named]


def differences(policy: tk.Policy) -> list[str]:
    """The choices in which a policy differs from its preset."""
    own, preset = choices_of(policy), choices_of(tk.policy(policy.name))
    return [f"{name}={value}" for name, value in own.items() if value != preset[name]]


def _checked(name: str, sets: Sets) -> tk.Policy:
    """The named policy with changed choices, each of which has an effect."""
    policy = with_choices(tk.policy(name), [(name, text) for name, text, _ in sets])
    for choice, value, flag in sets:
        if choice == "fork_threshold" and not _forks(policy):
            option = flag if flag == "--fork-threshold " else f"{flag}fork_threshold="
            raise tk.errors.PolicyError(
                f"{option}{value}: policy {policy.name!r} ignores fork_threshold. Leave it "
                "out, or take a policy that uses it: slime, trl or miles"
            )
    return policy


def _forks(policy: tk.Policy) -> bool:
    """Whether the policy uses ``fork_threshold``."""
    return policy.merge_rewrites or policy.absorbs_short


def with_choices(policy: tk.Policy, sets: Iterable[tuple[str, str]]) -> tk.Policy:
    """The policy with changed choices, by name and text as in `allowed`."""
    known = _known(policy)
    choices: dict[str, object] = {}
    for name, text in sets:
        where = f"policy {policy.name!r}, {name}={text}"
        if name in choices:
            raise tk.errors.PolicyError(f"{where}: the choice is given twice")
        if name not in known:
            raise tk.errors.PolicyError(
                f"{where}: no such choice{did_you_mean(name, known)}: expected one of "
                f"{', '.join(known)}"
            )
        values, other = known[name]
        if text in values:
            choices[name] = values[text]
        elif other == _NAMES:
            choices[name] = tuple(filter(None, text.split(",")))
        else:
            try:
                choices[name] = int(text if other else "no integer is accepted")
            except ValueError:
                raise tk.errors.PolicyError(
                    f"{where}{did_you_mean(text, values)}: expected "
                    f"{allowed(policy)[name]}"
                ) from None
    try:
        return tk.policy(policy, **choices)
    except tk.errors.PolicyError as error:
        raise tk.errors.PolicyError(f"policy {policy.name!r}: {error}") from None


def allowed(policy: tk.Policy) -> dict[str, str]:
    """The values that each choice accepts, as text; the policy's own options first."""
    found = {}
    for name, (values, other) in _known(policy).items():
        *before, last = [*filter(None, [other]), *values]
        found[name] = f"{', '.join(before)} or {last}" if before else last
    return found


def written(value: object) -> str:
    """A value as ``--set`` accepts it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return _NONE if value is None else str(value)


def choices_of(policy: tk.Policy) -> dict[str, str]:
    """Every choice of a policy and its value as text."""
    return {name: written(getattr(policy, name)) for name in _HINTS}


def _known(policy: tk.Policy) -> dict[str, tuple[dict[str, object], str]]:
    """By choice: values by their text, and what else it accepts, if anything."""
    options = IN_OTHER_WORDS.get(policy.name, {})
    known: dict[str, tuple[dict[str, object], str]] = {
        name: ({text: text for text in meant}, "") for name, meant in options.items()
    }
    for name, hint in _HINTS.items():
        if hint is bool:
            known[name] = {"true": True, "false": False}, ""
        elif get_origin(hint) is Literal:
            known[name] = {text: text for text in get_args(hint)}, ""
        elif get_origin(hint) is tuple:
            known[name] = {}, _NAMES
        else:
            known[name] = {} if hint is int else {_NONE: None}, "an integer"
    return known


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
    names = list(PRESETS) if policy is None else [policy]
    chosen = [tk.policy(name) for name in names]
    if json:
        print_json([asdict(one) for one in chosen])
    elif policy is None:
        drift = "\n".join(
            f"  {name}: {text.format(fork_threshold='fork_threshold')}"
            for name, text in RULES["on_drift"].items()
        )
        others = ", ".join(
            f"{alias} is {one.name} with {', '.join(differences(one))}"
            for alias, one in ALIASES.items()
            if one not in chosen
        )
        print_text(f"{describe(chosen)}\n\n{others}\n\non_drift\n{drift}")
    else:
        print_text(describe_choices(chosen[0]))


def describe(policies: list[tk.Policy]) -> str:
    """Each policy with the choices in which it differs from the defaults."""
    lines = []
    for policy in policies:
        aliases = [alias for alias, same in ALIASES.items() if same == policy]
        own = {
            name: value
            for name, value in choices_of(policy).items()
            if name not in DEFAULTS or value != written(DEFAULTS[name])
        }
        choices = ", ".join(f"{name}={value}" for name, value in own.items())
        lines.append([", ".join([policy.name, *aliases]), choices])
    defaults = ", ".join(f"{name}={written(value)}" for name, value in DEFAULTS.items())
    return f"{text_table(['policy', 'choices'], lines)}\n\notherwise: {defaults}"


def describe_choices(policy: tk.Policy) -> str:
    """Every choice of one policy, its value, and what it may be; and its rules in words."""
    values = choices_of(policy)
    lines = [
        # an option in the words of the policy's system, for choices below
        [name, values.get(name, ""), words]
        for name, words in allowed(policy).items()
    ]
    rules = (f"{name}={values[name]}: {rule_of(policy, name)}" for name in RULES)
    return text_table([policy.name, "is", "may be"], lines) + "\n\n" + "\n".join(rules)
