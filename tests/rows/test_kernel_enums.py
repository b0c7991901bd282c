"""Names that Python and the kernels share mean the same in both, or the import fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trajkit import _core, policies
from trajkit._kernel_names import numbers
from trajkit.view.tables import rule_in_words

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("_native/*.pxi"), ROOT / "_native" / "structs.pxd"]


def members_by_file():
    """The enums of the kernels: by their prefix, the names of the members in order."""
    found = {}
    for path in SOURCES:
        for body in re.findall(
            r"^cdef enum:[^\n]*\n((?:    .*\n|\n)+)", path.read_text(), re.M
        ):
            names = re.findall(r"\b([A-Z][A-Z_]*)\b", re.sub(r"#.*|=[^,\n]*", "", body))
            found[path.name, names[0]] = [
                name for name in names if not re.match(r"N_|.*_WIDTH$", name)
            ]
    return found


# The enums whose members have other endings than the names of Python.
PREFIXES = {"TurnColumn": "COL_"}


@pytest.mark.parametrize("enum", _core.ENUMS)
def test_each_name_has_the_number_of_its_member(enum):
    known = [*_core.ENUMS[enum]]
    assert [*_core.ENUMS[enum].values()] == [*range(len(known))]
    own = [
        members
        for members in members_by_file().values()
        if any(one.lower().endswith(f"_{known[0]}") for one in members[:1])
        and len(members) == len(known)
        and all(
            member.lower().endswith(f"_{name}")
            for name, member in zip(known, members, strict=True)
        )
    ]
    if enum in PREFIXES:  # columns have the table's names, not the members'
        columns = [m for ms in members_by_file().values() for m in ms]
        own = [[one for one in columns if one.startswith(PREFIXES[enum])]]
    assert [len(one) for one in own] == [len(known)]


@pytest.mark.parametrize(
    "names",
    [("first", "every", "earliest"), ("first", "earliest"), ("first", "x", "every")],
)
def test_other_names_or_another_order_are_no_import(names):
    assert numbers("TrainIn", ("first", "earliest", "every"))["every"] == 2
    with pytest.raises(ImportError, match="first, earliest, every of TrainIn"):
        numbers("TrainIn", names)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        # the rules of slime and of trl, exchanged
        ("policies.py", '"fork", "absorb_short_reply", "absorb_short_drift"', None),
        ("policies.py", 'TieBreak: TypeAlias = Literal["first", "tokens"', None),
        ("policies.py", 'TrainIn: TypeAlias = Literal["first", "earliest"', None),
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
    package.mkdir()
    for path in (ROOT / "trajkit").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    target = package / file
    if target.parent != package:
        target.parent.unlink()
        target.parent.mkdir()
        for path in (ROOT / "trajkit" / file).parent.glob("*.py"):
            (target.parent / path.name).symlink_to(path)
    text = (ROOT / "trajkit" / file).read_text()
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
