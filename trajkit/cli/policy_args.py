"""Policies and their choices as text: ``--policy NAME --set CHOICE=VALUE``."""

import argparse
from collections.abc import Iterable
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import trajkit as tk
from trajkit._arguments import did_you_mean
from trajkit.policies import IN_OTHER_WORDS

_BOOLS = {"true": True, "false": False}
_NONE = "none"

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
    """The policy with changed choices.

    Parameters
    ----------
    sets : iterable of pairs of str
        Attributes of `trajkit.Policy`, or the preset's own options (`IN_OTHER_WORDS`),
        and their values as `written` writes them.

    Raises
    ------
    PolicyError
        The policy has no such choice, the choice has no such value, it is given twice,
        or two choices exclude each other.
    """
    choices: dict[str, object] = {}
    for name, text in sets:
        where = f"policy {policy.name!r}, {name}={text}"
        if name in choices:
            raise tk.errors.PolicyError(f"{where}: the choice is given twice")
        if name not in {**_HINTS, **_options(policy)}:
            known = [*_options(policy), *_HINTS]
            raise tk.errors.PolicyError(
                f"{where}: no such choice{did_you_mean(name, known)}: expected one of "
                f"{', '.join(known)}"
            )
        choices[name] = _value(policy, name, text, where)
    try:
        return tk.policy(policy, **choices)
    except tk.errors.PolicyError as error:
        raise tk.errors.PolicyError(f"policy {policy.name!r}: {error}") from None


def allowed(policy: tk.Policy) -> dict[str, str]:
    """The values that each choice accepts, as text; the policy's own options first."""
    own = {name: _one_of(values) for name, values in _options(policy).items()}
    return {**own, **{name: _words(hint) for name, hint in _HINTS.items()}}


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


def _options(policy: tk.Policy) -> dict[str, tuple[str, ...]]:
    options = IN_OTHER_WORDS.get(policy.name, {})
    return {name: tuple(meant) for name, meant in options.items()}


def _value(policy: tk.Policy, name: str, text: str, where: str) -> object:
    """The text as a value of the choice's type."""
    hint = _HINTS.get(name)
    values = _options(policy).get(name) if hint is None else get_args(hint)
    if hint is bool and text in _BOOLS:
        return _BOOLS[text]
    if get_origin(hint) is tuple:
        return tuple(filter(None, text.split(",")))
    if (hint is None or get_origin(hint) is Literal) and text in (values or ()):
        return text
    if _is_int(hint):
        if text == _NONE and NoneType in get_args(hint):
            return None
        try:
            return int(text)
        except ValueError:
            pass
    hint = did_you_mean(text, [v for v in values or () if isinstance(v, str)])
    raise tk.errors.PolicyError(f"{where}{hint}: expected {allowed(policy)[name]}")


def _is_int(hint: object) -> bool:
    return hint is int or set(get_args(hint)) == {int, NoneType}


def _words(hint: object) -> str:
    if hint is bool:
        return _one_of(_BOOLS)
    if get_origin(hint) is tuple:
        return "names, separated by commas"
    if _is_int(hint):
        return "an integer" + (f" or {_NONE}" if hint is not int else "")
    return _one_of(get_args(hint))


def _one_of(values: Iterable[str]) -> str:
    *before, last = values
    return f"{', '.join(before)} or {last}" if before else last
