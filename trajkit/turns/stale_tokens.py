"""Tokens that old weights sampled, which a trainer may leave out."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int, chosen_names
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import Rows, TableLike, canonical, place, turns_schema
from trajkit.tables.ragged import Ragged, lengths, offsets_of
from trajkit.tables.reshape import with_column
from trajkit.tables.take import list_values
from trajkit.turns.records import as_turns
from trajkit.turns.validation import check_table


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

    Examples
    --------
    >>> import trajkit as tk
    >>> call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3, 4]}
    >>> parts = [("7", 0, 1), ("9", 1, 3)]
    >>> call["weight_versions"] = [
    ...     dict(zip(("version", "start", "stop"), part)) for part in parts
    ... ]
    >>> tk.turns.untrain_stale([call], 1)["output_mask"].to_pylist()
    [[False, True, True]]
    """
    max_lag = chosen_int("max_lag", max_lag, 0)
    table = as_turns(turns)
    table = check_table(canonical(table, turns_schema(table.column_names)), "turns")
    lists = Ragged.of(table.column("weight_versions"))
    start, stop, names = (
        pc.struct_field(lists.values, name) for name in ("start", "stop", "version")
    )
    numbers = _numbers(table, lists.owner, names, versions)
    newest = int(numbers.max(initial=0)) if versions is None else len(versions) - 1
    n_outputs = lengths(table.column("output_ids"))
    known = np.asarray(table.column("weight_versions").is_valid())
    old = np.zeros(int(n_outputs.sum()), np.bool_)
    # the spans of a turn tile its output
    sizes = np.asarray(pc.subtract(stop, start))
    old[np.repeat(known, n_outputs)] = np.repeat(newest - numbers > max_lag, sizes)
    owner = np.repeat(np.arange(len(table)), n_outputs)
    given = table.column("output_mask")
    has_mask = np.asarray(given.is_valid())
    mask = np.ones(len(old), np.bool_)
    mask[np.repeat(has_mask, n_outputs)] = np.asarray(list_values(given))
    kept = has_mask | (np.bincount(owner, old, len(table)) > 0)
    values = (mask & ~old)[np.repeat(kept, n_outputs)]
    masks = Ragged(values, offsets_of(np.where(kept, n_outputs, 0)))
    return with_column(table, "output_mask", masks.to_arrow(~kept, given.type))


def _numbers(
    table: pa.Table, call: Rows, names: pa.Array, versions: Sequence[str] | None
) -> Rows:
    """The place of each version in their order."""
    if versions is None:
        order: dict[str, int | None] = {
            name: _integer(name) for name in names.unique().to_pylist()
        }
        rule = "is no integer: give all versions, the oldest first, as versions"
    else:
        listed = chosen_names("versions", versions)
        order = {name: number for number, name in enumerate(listed)}
        if len(order) < len(listed):
            raise ArgumentError(f"versions={versions!r}: a version occurs twice")
        rule = "is not in versions"
    found = [order.get(name) for name in names.to_pylist()]
    for at, number in enumerate(found):
        if number is None:
            raise InvalidTurnsError(
                f"{place(table, int(call[at]))}: the weight version {names[at].as_py()!r} "
                f"{rule}"
            )
    return np.array(found, np.int64)


def _integer(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() else None
