"""``trajkit policies``: the policies and their choices."""

import argparse
import json
import sys
from dataclasses import asdict

import trajkit as tk
from trajkit.cli.options import command
from trajkit.cli.policy_args import DEFAULTS, allowed, choices_of, written
from trajkit.cli.text import text_table
from trajkit.policies import ALIASES, PRESETS, RULES, rule_of

_DRIFT = " ".join(f"{name}: {text}" for name, text in RULES["on_drift"].items())


@command(
    "policies",
    f"""
list the policies, or the choices of one

List the policies with the choices that differ from the defaults. With NAME, list all
choices of a policy, their values, what --set accepts, and what the policy does. on_drift is
what happens to a row when the next prompt departs from its path. {_DRIFT}

policy NAME  a policy
--json
""",
    policy={"nargs": "?"},
)
def run(arguments: argparse.Namespace) -> None:
    """Print the policies, or the choices of one."""
    names = list(PRESETS) if arguments.policy is None else [arguments.policy]
    policies = [tk.policy(name) for name in names]
    if arguments.json:
        text = json.dumps([asdict(policy) for policy in policies])
    elif arguments.policy is None:
        text = describe(policies)
    else:
        text = describe_choices(policies[0])
    sys.stdout.write(text + "\n")


def describe(policies: list[tk.Policy]) -> str:
    """Each policy with the choices in which it differs from the defaults."""
    lines = []
    for policy in policies:
        aliases = [alias for alias, name in ALIASES.items() if name == policy.name]
        own = {
            name: value
            for name, value in choices_of(policy).items()
            if name not in DEFAULTS or value != written(DEFAULTS[name])
        }
        said = ", ".join(f"{name}={value}" for name, value in own.items())
        lines.append([", ".join([policy.name, *aliases]), said])
    defaults = ", ".join(f"{name}={written(value)}" for name, value in DEFAULTS.items())
    return f"{text_table(['policy', 'choices'], lines)}\n\notherwise: {defaults}"


def describe_choices(policy: tk.Policy) -> str:
    """Every choice of one policy, its value, and what it may be; and its rules in words."""
    values = choices_of(policy)
    lines = [
        # an option in the words of the policy's system stands for choices below
        [name, values.get(name, ""), words]
        for name, words in allowed(policy).items()
    ]
    rules = (f"{name}={values[name]}: {rule_of(policy, name)}" for name in RULES)
    return text_table([policy.name, "is", "may be"], lines) + "\n\n" + "\n".join(rules)
