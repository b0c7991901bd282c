"""Model families with their own tokenizers and templates talk to the gateway.

The directories are made of public packages: `tests/shim/models/build.py`. Without them
(``TRAJKIT_MODELS``) these tests are skipped; `.ci/run models` builds them.
"""

import os
from pathlib import Path

import pytest

from benchmarks import models

TEN = (
    *("qwen2.5", "qwen3", "qwen3-coder", "glm-4.6", "deepseek-v3", "kimi-k2"),
    *("gpt-oss", "llama-3.1", "gemma-3", "mistral-nemo"),
)
DIRECTORY = os.environ.get("TRAJKIT_MODELS")

pytestmark = pytest.mark.skipif(DIRECTORY is None, reason="needs TRAJKIT_MODELS")


@pytest.mark.anyio
@pytest.mark.parametrize("name", TEN)
async def test_a_family_is_served_faithfully_and_read_as_transformers_does(name):
    found = await models.check(name, Path(DIRECTORY))
    assert found.faithful, found
    assert found.row(name) in models.PAGE.read_text("utf-8")
    assert models.differences(Path(DIRECTORY) / name) == []
