"""Names that Python and the kernels share mean the same in both, or the import fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trajkit import policies
from trajkit._kernel_names import numbers
from trajkit.view.tables import rule_in_words

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "names",
    [("first", "every", "earliest"), ("first", "earliest"), ("first", "x", "every")],
)
def test_other_names_or_another_order_are_no_import(names):
    assert numbers("TRAIN_IN_", ("first", "earliest", "every"))["every"] == 2
    with pytest.raises(ImportError, match="first, earliest, every of TRAIN_IN_"):
        numbers("TRAIN_IN_", names)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        # the rules of slime and of trl, exchanged
        ("policies.py", '"absorb_short_reply",\n    "absorb_short_drift"', None),
        ("policies.py", '    - ``"fork"``: A new row starts.\n', ""),
        (
            "schema/__init__.py",
            '("none", "last_reply", "earlier_reply", "prompt")',
            None,
        ),
        ("analysis/drift.py", '("path_start", "path_stop"', None),
    ],
)
def test_swapped_words_fail_at_import(tmp_path, file, old, new):
    package = tmp_path / "trajkit"
    shutil.copytree(ROOT / "trajkit", package, copy_function=os.symlink)
    target = package / file
    text = target.read_text()
    assert text.count(old) == 1
    if new is None:  # exchange the last two words
        *_, first, second = re.findall(r"\w+", old.replace(": int", ""))
        new = re.sub(
            rf"\b({first}|{second})\b",
            lambda found: second if found[0] == first else first,
            old,
        )
    target.unlink()
    target.write_text(text.replace(old, new))
    code = "import trajkit.analysis.drift, trajkit.rows.linearize"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr


@pytest.mark.parametrize("on_drift", policies.RULES["on_drift"])
def test_rules_in_words_are_on_the_page(on_drift):
    policy = policies.policy("skyrl", on_drift=on_drift, fork_threshold=1234)
    rule = policies.rule_of(policy, "on_drift")
    assert rule_in_words(policy).startswith(
        f"Where a prompt drifts: {rule[0].lower()}{rule[1:]}"
    )
    assert ("1,234" in rule) is policy.absorbs_short


def test_rules_in_words_are_in_the_documentation():
    text = " ".join(policies.Policy.__doc__.split())
    for rules in policies.RULES.values():
        for value, rule in rules.items():
            rule = rule.format(fork_threshold="``fork_threshold``")
            assert f'- ``"{value}"``: {rule}' in text
