"""Policies and their choices as text: ``--policy NAME --set CHOICE=VALUE``."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import trajkit as tk
from trajkit._arguments import did_you_mean
from trajkit.errors import ArgumentError
from trajkit.policies import IN_OTHER_WORDS, PRESETS

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

Set = tuple[str, str, str]
"""A choice, its value as text, and the option that set it."""


class PolicyWords:
    """The policies of options in their order: ``["--policy trl", "--set train_in=first"]``.

    A choice belongs to the policy before it.
    """

    def __init__(self, options: Iterable[str]) -> None:
        self._loose: list[Set] = []
        self._named: list[tuple[str, list[Set]]] = []
        for option in options:
            flag, _, text = option.partition(" ")
            if flag == "--policy":
                self._named.append((text, []))
                continue
            if flag == "--fork-threshold":
                name, equals, value = "fork_threshold", "=", text
                if not text.lstrip("-").isdigit():
                    raise ArgumentError(f"{flag} {text}: expected an integer")
            else:
                name, equals, value = text.partition("=")
            if not (name and equals):
                raise ArgumentError(f"{flag} {text!r}: expected CHOICE=VALUE")
            sets = self._named[-1][1] if self._named else self._loose
            sets.append((name, value, f"{flag} "))

    def one(self) -> tk.Policy:
        """The only policy, faithful by default."""
        if len(self._named) > 1:
            raise ArgumentError(
                f"--policy is given {len(self._named)} times: this takes one"
            )
        name, sets = self._named[0] if self._named else ("faithful", [])
        return checked_policy(name, [*self._loose, *sets])

    def required(self) -> tk.Policy:
        """As `one`, but without a default."""
        if not self._named:
            raise ArgumentError("--set and --fork-threshold need --policy")
        return self.one()

    def many(self) -> list[tk.Policy]:
        """All policies. A fork threshold alone is for every preset that uses it."""
        if self._named:
            if self._loose:
                raise ArgumentError(f"{self._loose[0][2]}needs a --policy before it")
            return [checked_policy(name, sets) for name, sets in self._named]
        if any(name != "fork_threshold" for name, _, _ in self._loose):
            raise ArgumentError("--set needs a --policy before it")
        return [
            checked_policy(one.name, self._loose) if _forks(one) else one
            for one in PRESETS.values()
        ]


def policy_of(text: str) -> tk.Policy:
    """The policy of ``"NAME CHOICE=VALUE ..."``."""
    name, *sets = text.split() or [""]
    return PolicyWords([f"--policy {name}", *(f"--set {one}" for one in sets)]).one()


def text_of(words: Iterable[str] | None) -> list[str]:
    """The policies of options as texts for `policy_of`; every preset without options."""
    if words is None:
        return [*PRESETS]
    named = PolicyWords(words).many()
    return [" ".join([one.name, *_differences(one)]) for one in named]


def _differences(policy: tk.Policy) -> list[str]:
    own, preset = choices_of(policy), choices_of(tk.policy(policy.name))
    return [f"{name}={value}" for name, value in own.items() if value != preset[name]]


def checked_policy(name: str, sets: Iterable[Set]) -> tk.Policy:
    """The named policy with changed choices."""
    sets = list(sets)
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
