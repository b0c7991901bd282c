"""Prompts for an engine, and what it must sample before anyone is served."""

import numpy as np
import pytest

from tests.shim.fakes import ScriptedEngine, sampled
from trajkit_shim.engines.base import EngineInfo
from trajkit_shim.engines.checks import check_engine, check_prompt
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio


async def test_an_engine_that_serves():
    engine = ScriptedEngine("a")
    await check_engine(engine)
    assert engine.closed
    assert engine.samplings[0].max_new_tokens == 2


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        pytest.param(EngineError("gone"), "does not work: gone", id="fails"),
        pytest.param(
            sampled("a", output_logprobs=None), "no logprobs", id="no logprobs"
        ),
        pytest.param(
            sampled("", finish_reason="length", weight_versions=()),
            "no output ids",
            id="no ids",
        ),
        pytest.param(
            sampled("a", output_logprobs=sampled("abc").output_logprobs),
            "4 logprobs for 2",
            id="too many logprobs",
        ),
    ],
)
async def test_an_engine_that_does_not(reply, said):
    engine = ScriptedEngine(reply)
    with pytest.raises(ConnectionError, match=said):
        await check_engine(engine)
    assert engine.closed


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        pytest.param([1, 50], r"prompt_ids\[1\] = 50", id="id past the vocabulary"),
        pytest.param([-1], r"prompt_ids\[0\] = -1", id="negative id"),
        pytest.param([], "no tokens", id="empty"),
        pytest.param([[1]], "shape", id="two dimensions"),
        pytest.param([1] * 10, "maximum context length is 10", id="no room"),
    ],
)
def test_a_prompt_that_no_engine_gets(prompt, said):
    info = EngineInfo(model="m", vocab_size=50, max_context_tokens=10)
    check_prompt(np.array([0, 49], np.int32), info)
    with pytest.raises(EngineError, match=said) as caught:
        check_prompt(np.array(prompt, np.int32), info)
    assert caught.value.status == 400
