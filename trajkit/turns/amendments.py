"""Apply amendments (facts that became known later) to turns."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.schema import AMENDMENTS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import canonical
from trajkit.tables.reshape import with_column


class Amendments:
    """The last amendment of each turn in a table of `trajkit.schema.AMENDMENTS`."""

    def __init__(self, table: pa.Table) -> None:
        table = canonical(table, AMENDMENTS)
        self._sessions = pc.unique(table.column("session_id"))
        keys = self._keys(table)
        # unique() returns the first of equal keys, so look at them in reverse
        self._keys_known, back = np.unique(keys[::-1], return_index=True)
        last = table.take(pa.array(len(table) - 1 - back))
        self._reason = last.column("reason").combine_chunks()
        self._trainable = last.column("trainable").combine_chunks()

    def fold_into(self, turns: pa.Table) -> pa.Table:
        """The turns as amended, with the reason as the column ``amended``.

        A turn with ``trainable=False`` keeps it. Amendments of other turns are ignored.
        """
        keys = self._keys(turns)
        at = np.searchsorted(self._keys_known, keys)
        at[at == len(self._keys_known)] = 0
        known = np.zeros(len(keys), np.bool_)
        if len(self._keys_known):
            known = self._keys_known[at] == keys
        found = pa.array(at, mask=~known)
        context = pc.equal(self._trainable.take(found), False).fill_null(False)
        trainable = pc.if_else(
            context, pa.scalar(False), turns.column("trainable").combine_chunks()
        )
        amended = self._reason.take(found)
        return with_column(
            with_column(turns, "trainable", trainable), "amended", amended
        )

    def _keys(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """One number per turn; the minimum of int64 if its session has no amendment."""
        codes = pc.index_in(table.column("session_id"), self._sessions).fill_null(-1)
        code = np.asarray(codes).astype(np.int64)
        index = np.asarray(table.column("turn_index")).astype(np.int64)
        # turn_index has 32 bits and may be negative here
        none = np.iinfo(np.int64).min
        keys: npt.NDArray[np.int64] = np.where(code < 0, none, (code << 32) + index)
        return keys
