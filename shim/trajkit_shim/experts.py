"""The experts that each token was routed to, for trainers that replay the routing.

An engine that computes a sequence says, for every token that it read, which experts of
each layer took it. The last token of a call was sampled and not read: it has none, and
the log holds null for it.
"""

import base64
import binascii
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit_shim.engine import EngineError
from trajkit_shim.model_config import config_number

Experts = npt.NDArray[np.int16]

COLUMN = pa.field("routed_experts", pa.large_list(pa.list_(pa.list_(pa.int16()))))
"""Per token of prompt and output a list per layer of the experts that it was routed to;
null: the token was not read. A payload for `trajkit.linearize`."""


def read_experts(packed: object, n_tokens: int, per_token: int) -> Experts:
    """What SGLang packs into ``meta_info.routed_experts`` (0.5.23).

    Parameters
    ----------
    packed : object
        Base64 of little-endian int32, of shape (n_tokens - 1, n_layers, per_token).
    n_tokens : int
        Of prompt and output.
    per_token : int
        Experts that a layer routes a token to.

    Returns
    -------
    ndarray of int16, shape (n_tokens - 1, n_layers, per_token)

    Raises
    ------
    EngineError
        There is none, or not that many, or an expert's number is below 0 or too large.
    """
    if not isinstance(packed, str):
        raise EngineError(
            "the SGLang server gave no routed_experts: it needs a model of experts and "
            "--enable-return-routed-experts"
        )
    try:
        flat = np.frombuffer(base64.b64decode(packed, validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise EngineError(
            f"the SGLang server's routed_experts cannot be read: {error}"
        ) from error
    rows = n_tokens - 1
    if not rows or not len(flat) or len(flat) % (rows * per_token):
        raise EngineError(
            f"the SGLang server gave {len(flat)} routed experts for {rows} tokens of "
            f"{per_token} a layer"
        )
    most = np.iinfo(np.int16).max
    if flat.min() < 0 or flat.max() > most:
        raise EngineError(
            f"the SGLang server's routed_experts are in [{flat.min()}, {flat.max()}]: "
            f"expected numbers in [0, {most}]"
        )
    return flat.astype(np.int16).reshape(rows, -1, per_token)


def experts_cell(experts: Experts | None) -> pa.Array:
    """A turn's element of `COLUMN`; its last token has none."""
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
    """How many experts a layer routes a token to, from a model's ``config.json``.

    Raises
    ------
    ValueError
        The file does not tell.
    OSError
        There is no such file.
    """
    number = config_number(model_dir, "num_experts_per_tok")
    if number is not None and number > 0:
        return number
    raise ValueError(
        f"{model_dir}/config.json tells no num_experts_per_tok: this is no model of "
        "experts"
    )
