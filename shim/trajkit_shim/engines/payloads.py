"""What an engine gives per token besides ids and logprobs, as columns of the turn log.

Routed experts are for trainers that replay the routing: the experts of each layer for
every token that the engine processed. The last token of a call was sampled but not
processed, so the log has null for it. A sampling mask is for trainers that normalise over
the ids that could have been drawn.
"""

import base64
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit_shim.errors import EngineError

Experts = npt.NDArray[np.int16]

EXPERTS = pa.field("routed_experts", pa.large_list(pa.list_(pa.list_(pa.int16()))))
"""For each token of prompt and output, a list per layer of its experts; null: the token
was not processed. A payload for `trajkit.linearize`."""

MASK = pa.field("sampling_mask", pa.large_list(pa.list_(pa.int32())))
"""For each output token the ids that could have been drawn in its place, itself included;
null for a turn: every id could. A payload for `trajkit.linearize`."""


def read_experts(server: str, packed: object, n_tokens: int, per_token: int) -> Experts:
    """Decode the ``routed_experts`` of SGLang (0.5.23) or vLLM (0.32).

    SGLang's are base64 of little-endian int32, vLLM's of an ``.npy`` file. The result is
    int16 of shape (n_tokens - 1, n_layers, per_token), for ``n_tokens`` of prompt and
    output. Raises `EngineError` or `ValueError`.
    """
    if not isinstance(packed, str):
        raise EngineError(
            f"the {server} server gave no routed_experts: it needs a mixture-of-experts "
            "model and --enable-return-routed-experts"
        )
    data, rows = base64.b64decode(packed, validate=True), n_tokens - 1
    if server == "vLLM":
        found = np.load(io.BytesIO(data), allow_pickle=False)
    else:
        flat = np.frombuffer(data, "<i4")
        fits = rows * per_token and not len(flat) % (rows * per_token)
        found = flat.reshape(rows, -1, per_token) if fits else flat
    if found.ndim != 3 or not found.size or found.shape[::2] != (rows, per_token):
        raise EngineError(
            f"the {server} server gave routed experts of shape {found.shape} for {rows} "
            f"tokens with {per_token} a layer"
        )
    maximum = np.iinfo(np.int16).max
    if found.dtype.kind not in "iu" or found.min() < 0 or found.max() > maximum:
        raise EngineError(
            f"the {server} server's routed_experts are {found.dtype} in [{found.min()}, "
            f"{found.max()}]: expected integers in [0, {maximum}]"
        )
    return np.asarray(found, np.int16)


def experts_cell(experts: Experts | None) -> pa.Array:
    """Return a turn's element of `EXPERTS`, with null for its last token."""
    if experts is None:
        return pa.nulls(1, EXPERTS.type)
    of_token = pa.array(experts.reshape(-1))
    for length in experts.shape[:0:-1]:
        of_token = pa.FixedSizeListArray.from_arrays(of_token, length)
    of_token = of_token.cast(EXPERTS.type.value_type)
    items = pa.concat_arrays([of_token, pa.nulls(1, of_token.type)])
    return pa.LargeListArray.from_arrays(pa.array([0, len(items)], pa.int64()), items)


def mask_cell(mask: Sequence[Sequence[int]] | None) -> pa.Array:
    """Return a turn's element of `MASK`."""
    return pa.array([mask], MASK.type)
