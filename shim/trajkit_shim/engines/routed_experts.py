"""The experts that each token was routed to, for trainers that replay the routing.

The engine reports the experts of each layer for every token that it processed. The last
token of a call was sampled but not processed, so the log has null for it.
"""

import base64

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit_shim.engines.http import reading
from trajkit_shim.errors import EngineError

Experts = npt.NDArray[np.int16]

COLUMN = pa.field("routed_experts", pa.large_list(pa.list_(pa.list_(pa.int16()))))
"""For each token of prompt and output, a list per layer of its experts; null: the token
was not processed. A payload for `trajkit.linearize`."""


def read_experts(packed: object, n_tokens: int, per_token: int) -> Experts:
    """Decode SGLang's ``meta_info.routed_experts`` (0.5.23).

    It is base64 of little-endian int32, of shape (n_tokens - 1, n_layers, per_token) for
    ``n_tokens`` of prompt and output. The result has that shape, as int16.
    """
    if not isinstance(packed, str):
        raise EngineError(
            "the SGLang server gave no routed_experts: it needs a mixture-of-experts "
            "model and --enable-return-routed-experts"
        )
    with reading("SGLang", "routed_experts"):
        flat = np.frombuffer(base64.b64decode(packed, validate=True), "<i4")
    rows = n_tokens - 1
    if rows * per_token < 1 or not len(flat) or len(flat) % (rows * per_token):
        raise EngineError(
            f"the SGLang server gave {len(flat)} routed experts for {rows} tokens with "
            f"{per_token} a layer"
        )
    maximum = np.iinfo(np.int16).max
    if flat.min() < 0 or flat.max() > maximum:
        raise EngineError(
            f"the SGLang server's routed_experts are in [{flat.min()}, {flat.max()}]: "
            f"expected numbers in [0, {maximum}]"
        )
    return flat.astype(np.int16).reshape(rows, -1, per_token)


def experts_cell(experts: Experts | None) -> pa.Array:
    """Return a turn's element of `COLUMN`, with null for its last token."""
    if experts is None:
        return pa.nulls(1, COLUMN.type)
    of_token = pa.array(experts.reshape(-1))
    for length in experts.shape[:0:-1]:
        of_token = pa.FixedSizeListArray.from_arrays(of_token, length)
    of_token = of_token.cast(COLUMN.type.value_type)
    items = pa.concat_arrays([of_token, pa.nulls(1, of_token.type)])
    return pa.LargeListArray.from_arrays(pa.array([0, len(items)], pa.int64()), items)
