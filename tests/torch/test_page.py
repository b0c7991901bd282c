"""The page on torch runs, public functions say what they take."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trajkit.torch
from tests.test_layout import assert_documented
from tests.torch.test_varlen import flash_attn_varlen_func

ROOT = Path(__file__).parents[2]


def test_the_snippets_of_the_page_train(capsys, monkeypatch):
    kernels = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", kernels)
    page = (ROOT / "docs/torch.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/torch.md", "exec"), known)
        assert capsys.readouterr().out == ""
        gradients = [p.grad for p in known["model"].parameters()]
        assert all(torch.isfinite(g).all() for g in gradients)
        assert any(g.any() for g in gradients)
        known["model"].zero_grad()


@pytest.mark.parametrize("name", dir(trajkit.torch))
def test_public_names_are_documented(name):
    assert_documented(getattr(trajkit.torch, name))
    assert f"`{name}`" in (ROOT / "docs/api.md").read_text(encoding="utf-8")
