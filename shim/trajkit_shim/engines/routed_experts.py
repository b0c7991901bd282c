"""The experts that each token was routed to, for trainers that replay the routing.

The engine reports the experts of each layer for every token that it processed. The last
token of a call was sampled but not processed, so the log has null for it.
"""

import base64
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit_shim.engines.http import reading
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.errors import EngineError

Experts = npt.NDArray[np.int16]

COLUMN = pa.field("routed_experts", pa.large_list(pa.list_(pa.list_(pa.int16()))))
"""For each token of prompt and output, a list per layer of its experts; null: the token
was not processed. A payload for `trajkit.linearize`."""


def read_experts(packed: object, n_tokens: int, per_token: int) -> Experts:
    """Decode SGLang's ``meta_info.routed_experts`` (0.5.23).

    It is base64 of little-endian int32, of shape (n_tokens - 1, n_layers, per_token) for
    ``n_tokens`` of prompt and output. The result has that shape, as int16. Raises
    `EngineError` if it is missing, has another length, or a number outside int16.
    """
    if not isinstance(packed, str):
        raise EngineError(
            "the SGLang server gave no routed_experts: it needs a mixture-of-experts "
            "model and --enable-return-routed-experts"
        )
    with reading("SGLang", "routed_experts"):
        flat = np.frombuffer(base64.b64decode(packed, validate=True), "<i4")
    rows = n_tokens - 1
    if not rows or not len(flat) or len(flat) % (rows * per_token):
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
    rows, layers, per_token = experts.shape
    of_layer = pa.ListArray.from_arrays(
        np.arange(0, experts.size + 1, per_token, dtype=np.int32),
        pa.array(experts.reshape(-1)),
    )
    ends = np.arange(0, rows * layers + 1, layers, dtype=np.int32)
    of_token = pa.ListArray.from_arrays(
        pa.array([*ends[:-1], ends[-1], ends[-1]], pa.int32()),
        of_layer,
        mask=pa.array(np.arange(rows + 1) == rows),
    )
    return pa.LargeListArray.from_arrays(pa.array([0, rows + 1], pa.int64()), of_token)


def experts_per_token(model_dir: str | Path) -> int:
    """Return the experts per token and layer, from a model's ``config.json``.

    Raises `ValueError` if the file has no such number, `OSError` if there is no file.
    """
    number = config_number(model_dir, "num_experts_per_tok")
    if number < 1:
        raise ValueError(f"{model_dir}/config.json: num_experts_per_tok = {number}")
    return number
