"""Whether an engine gives what is recorded, found out before anyone is served."""

import uuid

import numpy as np

from trajkit_shim.engine import Engine, EngineError, Sampling
from trajkit_shim.limits import check_sample


async def probe(engine: Engine) -> None:
    """Sample two tokens of an engine, and close it.

    Raises
    ------
    ConnectionError
        The engine cannot be reached, samples nothing, or gives no logprobs.
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
        raise ConnectionError(f"the engine does not serve: {error}") from error
    finally:
        await engine.close()
    if not len(sample.output_ids) or sample.output_logprobs is None:
        raise ConnectionError(
            f"the engine gave {len(sample.output_ids)} output ids and "
            f"{'no ' if sample.output_logprobs is None else ''}logprobs for a prompt of "
            "one token: nothing could be trained on what it samples"
        )
