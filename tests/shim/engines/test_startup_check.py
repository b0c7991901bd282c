"""What is asked of an engine before anyone is served."""

import pytest

from tests.shim.fakes import ScriptedEngine, sampled
from trajkit_shim.engines.checks import check_engine
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
            "0 output",
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
