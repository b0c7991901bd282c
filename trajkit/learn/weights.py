"""Row weights, so that the weight of a rollout does not depend on its number of rows."""

from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_number
from trajkit.errors import ArgumentError
from trajkit.tables.canonical import TableLike, canonical_rows
from trajkit.tables.columns import with_column
from trajkit.tables.ragged import Longs, Ragged, codes
from trajkit.tables.stages import apply, stage

By: TypeAlias = Literal["token", "row", "rollout"]
Weighing: TypeAlias = Literal[By, "constant"]


@stage
def add_weights(
    rows: TableLike, weigh_by: Weighing = "token", *, constant: float | None = None
) -> pa.Table:
    """Set ``row_weight``, by default so that every rollout has a total weight of one.

    ``n`` is the number of trained tokens of a row, ``N`` that of all rows of its
    rollout, and ``K`` the number of the rollout's rows that train:

    ========= ============== ====================================== ===================
    weigh_by  row_weight     sums to one over a rollout             for a trainer that
    ========= ============== ====================================== ===================
    token     ``n / N``      the weights of its rows                averages in a row
    row       ``1 / K``      the weights of its rows                averages in a row
    rollout   ``1 / N``      the weights of its trained tokens      sums in a row
    constant  ``1 / c``      none: a rollout weighs ``N / c``       sums in a row
    ========= ============== ====================================== ===================

    ``token`` and ``rollout`` give the same loss: every trained token of a rollout has
    the same weight in any row. ``row`` gives the mean of the rows' means, which depends
    on how the rollout was cut into rows. Under ``constant`` a long rollout weighs more:
    with the longest possible completion for ``c`` this is the loss of Dr. GRPO, with
    the batch's mean of ``N`` the token-level loss of DAPO.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` with all rows of each session.
    weigh_by : {"token", "row", "rollout", "constant"}
    constant : float, for weigh_by="constant"
        ``c``, in tokens; above 0.

    Returns
    -------
    Table
        The rows with new ``row_weight`` and ``rollout_mask_sum`` (``N``). A row that
        trains nothing has weight 0; if ``N`` is 0, the weights are null.

    Raises
    ------
    ArgumentError
        ``weigh_by`` does not exist, or it does not go with ``constant``.

    References
    ----------
    ``rollout`` is slime's denominator per rollout_id:
    https://github.com/THUDM/slime/blob/624b824/slime/ray/rollout.py
    Dr. GRPO: arXiv 2503.20783, section 3.2. DAPO: arXiv 2503.14476, section 3.3.
    """
    check_choice("weigh_by", weigh_by, Weighing)
    if (constant is not None) != (weigh_by == "constant"):
        raise ArgumentError(
            f"weigh_by={weigh_by!r} with constant={constant!r}: weigh_by='constant' needs "
            "constant, and no other value takes it"
        )
    if constant is not None:
        check_number("constant", constant, 0, above=True)
    return apply(lambda rows: _weighed(rows, weigh_by, constant), rows)


add_weights_batches = add_weights.batches


def _weighed(rows: pa.Table, weigh_by: Weighing, constant: float | None) -> pa.Table:
    table = canonical_rows(rows)
    session, n_trained = codes(table.column("session_id")), trained_tokens(table)
    mask_sum = np.bincount(session, n_trained)[session].astype(np.int64)
    trains = (n_trained > 0).astype(np.float64)
    if weigh_by == "token":
        weight = n_trained / np.maximum(mask_sum, 1)
    elif weigh_by == "row":
        n_rows = np.bincount(session, trains)[session]
        weight = trains / np.maximum(n_rows, 1)
    else:
        weight = trains / (np.maximum(mask_sum, 1) if constant is None else constant)
    table = with_column(table, "row_weight", pa.array(weight, mask=mask_sum == 0))
    return with_column(table, "rollout_mask_sum", pa.array(mask_sum))


def trained_tokens(table: pa.Table) -> Longs:
    """Trained tokens of each row."""
    mask = Ragged.of(table.column("loss_mask"), fill=False)
    return np.diff(np.searchsorted(np.flatnonzero(mask.values), mask.offsets))
