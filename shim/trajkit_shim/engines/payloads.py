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


def read_flat_experts(packed: object, n_tokens: int, per_token: int) -> Experts:
    """Decode SGLang's ``meta_info.routed_experts`` (0.5.23).

    It is base64 of little-endian int32, of shape (n_tokens - 1, n_layers, per_token) for
    ``n_tokens`` of prompt and output. The result has that shape, as int16.
    """
    flat = np.frombuffer(_decoded("SGLang", packed), "<i4")
    rows = n_tokens - 1
    if rows * per_token < 1 or not len(flat) or len(flat) % (rows * per_token):
        raise EngineError(
            f"the SGLang server gave {len(flat)} routed experts for {rows} tokens with "
            f"{per_token} a layer"
        )
    return _as_experts("SGLang", flat.reshape(rows, -1, per_token))


def read_npy_experts(packed: object, n_tokens: int, per_token: int) -> Experts:
    """Decode vLLM's ``routed_experts`` (0.32): base64 of an ``.npy`` file of integers.

    Shape and result are those of `read_flat_experts`.
    """
    data = io.BytesIO(_decoded("vLLM", packed))
    found = np.load(data, allow_pickle=False)
    wanted = (n_tokens - 1, per_token)
    if found.ndim != 3 or (found.shape[0], found.shape[2]) != wanted:
        raise EngineError(
            f"the vLLM server gave routed experts of shape {found.shape} for "
            f"{n_tokens - 1} tokens with {per_token} a layer"
        )
    if found.dtype.kind not in "iu":
        raise EngineError(f"the vLLM server's routed experts are {found.dtype}")
    return _as_experts("vLLM", found)


def _decoded(server: str, packed: object) -> bytes:
    if not isinstance(packed, str):
        raise EngineError(
            f"the {server} server gave no routed_experts: it needs a mixture-of-experts "
            "model and --enable-return-routed-experts"
        )
    return base64.b64decode(packed, validate=True)


def _as_experts(server: str, experts: npt.NDArray[np.integer]) -> Experts:
    maximum = np.iinfo(np.int16).max
    if experts.size and (experts.min() < 0 or experts.max() > maximum):
        raise EngineError(
            f"the {server} server's routed_experts are in "
            f"[{experts.min()}, {experts.max()}]: expected numbers in [0, {maximum}]"
        )
    return experts.astype(np.int16)


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
