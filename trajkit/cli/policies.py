"""``trajkit policies``: the policies and their choices."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

import trajkit as tk
from trajkit.analysis.simulation import label
from trajkit.cli.options import Json, print_json, print_text
from trajkit.cli.policy_words import DEFAULTS, allowed, choices_of, written
from trajkit.cli.screen import text_table
from trajkit.policies import ALIASES, PRESETS, RULES, rule_of


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
            f"{alias} is {label(one)}"
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
