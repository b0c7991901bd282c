"""Checks at startup that an engine returns everything that is recorded."""

import uuid

import numpy as np

from trajkit_shim.engines.base import Engine, Sampling
from trajkit_shim.engines.checks import check_sample
from trajkit_shim.errors import EngineError


async def check_engine(engine: Engine) -> None:
    """Sample two tokens, and close the engine.

    Raises `ConnectionError` if it cannot be reached, samples nothing, or returns no
    logprobs.
    """
    try:
        info = await engine.info()
        sample = await engine.generate(
            np.zeros(1, np.int32),
            Sampling(max_new_tokens=2, temperature=1.0),
            request_id=uuid.uuid4().hex,
            session_id="probe",
        )
        check_sample(sample, info)
    except EngineError as error:
        raise ConnectionError(f"the engine does not work: {error}") from error
    finally:
        await engine.close()
    if not len(sample.output_ids) or sample.output_logprobs is None:
        raise ConnectionError(
            f"the engine returned {len(sample.output_ids)} output ids and "
            f"{'no ' if sample.output_logprobs is None else ''}logprobs for a prompt of "
            "one token: its samples could not be trained"
        )
