"""Policies and their choices as text: ``--policy NAME --set CHOICE=VALUE``."""

import argparse
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import trajkit as tk
from trajkit._arguments import did_you_mean
from trajkit.policies import IN_OTHER_WORDS

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

Set = tuple[str, str]
"""A choice and its value, as text."""


def setting(text: str) -> Set:
    """Split ``CHOICE=VALUE``."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: expected CHOICE=VALUE")
    return name, value


def with_choices(policy: tk.Policy, sets: Iterable[Set]) -> tk.Policy:
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
