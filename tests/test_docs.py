"""The example on a page of the documentation prints what the page says."""

import re
from pathlib import Path

import pytest

from trajkit.policies import PRESETS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_policies_page_prints_what_it_says(capsys):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    code, said = re.search(
        r"```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL
    ).groups()
    exec(compile(code, "docs/policies.md", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line.rstrip() for line in said.splitlines()]


@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_has_its_section(policy):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert re.search(rf"^### {policy}\b", page, re.MULTILINE)
