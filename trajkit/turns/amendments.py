"""What became known after turns were recorded: amendments, and stale weights."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int, chosen_names
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import AMENDMENTS
from trajkit.schema.engine import field_of, fields_of, list_values, nulls
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, canonical, place, turns_schema
from trajkit.tables.columns import with_column
from trajkit.tables.ragged import Keys, Longs, Ragged, offsets_of
from trajkit.turns.records import as_turns
from trajkit.turns.validation import check_table


class Amendments:
    """The last amendment of each turn in a table of `trajkit.schema.AMENDMENTS`."""

    def __init__(self, table: pa.Table) -> None:
        # the first of equal keys is found
        self._last = canonical(table, AMENDMENTS)[::-1].combine_chunks()
        self._sessions = self._last.column("session_id").unique()
        self._keys = self._keys_of(self._last)

    def fold_into(self, turns: pa.Table) -> pa.Table:
        """The turns as amended, with the reason as the column ``amended``."""
        at = self._keys.find(self._keys_of(turns))
        found = self._last.take(pa.array(at, mask=at < 0))
        context = pc.equal(found.column("trainable"), False).fill_null(False)
        own = turns.column("trainable")
        trainable = pc.if_else(context, pa.scalar(False), own).combine_chunks()
        amended = with_column(turns, "trainable", trainable)
        return with_column(amended, "amended", found.column("reason").combine_chunks())

    def _keys_of(self, table: pa.Table) -> Keys:
        """Each line's turn; of no key if its session has no amendment."""
        numbers = pc.index_in(table.column("session_id"), self._sessions)
        index = np.asarray(table.column("turn_index"), np.int64)
        return Keys(np.asarray(numbers.fill_null(-1), np.int64), index)


def untrain_stale(
    turns: TableLike, max_lag: int, *, versions: Sequence[str] | None = None
) -> pa.Table:
    """Clear ``output_mask`` of tokens that weights of more than some versions ago sampled.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form, with ``weight_versions``.
    max_lag : int
        Versions that the weights of a token may be behind the newest; 0 or more.
    versions : sequence of str, optional
        All versions, the oldest first; the last is the newest. None: versions are
        integers, each one more than the one before, and the newest is the largest of
        the table.

    Returns
    -------
    Table
        The turns. A token without a known version keeps its mask, and turns without
        such tokens keep a null. Rows and reports count what is cleared as masked.

    Raises
    ------
    ArgumentError
        ``max_lag`` is no integer of 0 or more; ``versions`` repeats one.
    InvalidTurnsError
        A turn has a version that is not in ``versions`` or, without them, no integer; or
        a value breaks a rule of the schema.
    """
    max_lag = chosen_int("max_lag", max_lag, 0)
    table = as_turns(turns)
    table = check_table(canonical(table, turns_schema(table.column_names)), "turns")
    given, column = table.column("output_mask"), table.column("weight_versions")
    lists, outputs = Ragged.of(column), Ragged.of(table.column("output_ids"))
    start, stop = fields_of(lists.values, "start", "stop")
    numbers = _version_numbers(table, lists, versions)
    newest = int(numbers.max(initial=0)) if versions is None else len(versions) - 1
    owner = outputs.owner
    old, mask = np.zeros(len(owner), np.bool_), np.ones(len(owner), np.bool_)
    # the spans of a turn tile its output
    tiled, has_mask = ~nulls(column)[owner], ~nulls(given)
    old[tiled] = np.repeat(newest - numbers > max_lag, stop - start)
    mask[has_mask[owner]] = np.asarray(list_values(given))
    kept = has_mask | (np.bincount(owner, old, len(table)) > 0)
    values = (mask & ~old)[kept[owner]]
    masks = Ragged(values, offsets_of(np.where(kept, outputs.lengths, 0)))
    return with_column(table, "output_mask", masks.to_arrow(~kept, given.type))


def _version_numbers(
    table: pa.Table, lists: Ragged, versions: Sequence[str] | None
) -> Longs:
    """The place of each span's version in their order."""
    names = field_of(lists.values, "version").to_pylist()
    order = {n: int(n) for n in {*names} if n.isascii() and n.isdigit()}
    rule = "is no integer: give all versions, the oldest first, as versions"
    if versions is not None:
        listed, rule = chosen_names("versions", versions), "is not in versions"
        order = {name: number for number, name in enumerate(listed)}
        if len(order) < len(listed):
            raise ArgumentError(f"versions={versions!r}: a version occurs twice")
    for at, name in enumerate(names):
        if name not in order:
            where = place(table, int(lists.owner[at]))
            raise InvalidTurnsError(f"{where}: the weight version {name!r} {rule}")
    return np.array([order[name] for name in names], np.int64)
