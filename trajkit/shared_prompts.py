"""First prompts that several sessions of a table share, held once.

The rollouts of one task begin with the same prompt. In delta form the first turn of each
holds it in full; here it stands in a dictionary, of which Parquet and Arrow IPC write each
entry once. No turn refers to another session, so sessions can still be taken apart.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import compute as pc
from trajkit.errors import InvalidTurnsError, SchemaError

NAME = "shared_prompt"
"""A column behind those of the delta form: ids that come before ``suffix_ids``, four
bytes each, lowest first. null: none."""

TYPE = pa.dictionary(pa.int32(), pa.large_binary())


def share(turns: pa.Table) -> pa.Table:
    """Turns in delta form with the prompts that several of them begin with held once.

    A prompt is shared where another turn without a base has the same ids. In such a turn
    ``suffix_ids`` is empty.

    Parameters
    ----------
    turns : Table
        `trajkit.schema.TURNS_DELTA`, in canonical form.
    """
    suffixes = turns.column("suffix_ids").combine_chunks()
    offsets = suffixes.offsets.to_numpy()
    values = suffixes.values.to_numpy()
    roots = np.flatnonzero(turns.column("base_turn").is_null().to_numpy())
    roots = roots[offsets[roots + 1] > offsets[roots]]
    texts = [values[offsets[row] : offsets[row + 1]].tobytes() for row in roots]
    numbers: dict[bytes, int] = {}
    of_root = np.array([numbers.setdefault(t, len(numbers)) for t in texts], np.int64)
    often = np.bincount(of_root, minlength=len(numbers)) > 1
    held = np.cumsum(often) - 1
    codes = np.full(len(turns), -1, np.int32)
    codes[roots] = np.where(often, held, -1)[of_root]
    prompts = pa.array(
        [text for text, some in zip(numbers, often, strict=True) if some],
        pa.large_binary(),
    )
    column = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), prompts)
    left = np.where(codes < 0, np.diff(offsets), 0)
    ends = np.zeros(len(turns) + 1, np.int64)
    np.cumsum(left, out=ends[1:])
    own = np.repeat(codes < 0, np.diff(offsets))
    kept = values[offsets[0] : offsets[-1]][own]
    at = turns.column_names.index("suffix_ids")
    lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(kept))
    turns = turns.set_column(at, turns.field(at), lists)
    return turns.append_column(NAME, column.cast(TYPE))


def unshare(turns: pa.Table) -> pa.Table:
    """The turns with every prompt in its place; others come back as they are.

    Raises
    ------
    SchemaError
        The column is not one of bytes.
    InvalidTurnsError
        A shared prompt is not of whole ids, or stands in a turn that has a base.
    """
    if NAME not in turns.column_names or "suffix_ids" not in turns.column_names:
        return turns
    kind = turns.schema.field("suffix_ids").type
    if not pa.types.is_nested(kind) or not pa.types.is_integer(kind.value_type):
        return turns  # whoever reads the turns says that these are no ids
    chunks = turns.column(NAME).chunks
    held = turns.schema.field(NAME).type
    if not _is_bytes(held.value_type if pa.types.is_dictionary(held) else held):
        raise SchemaError(f"column {NAME!r} is {held}: expected {TYPE}")
    if pa.types.is_dictionary(held):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
    plain = pa.chunked_array(
        [chunk.cast(pa.large_binary()) for chunk in chunks], pa.large_binary()
    )
    n_bytes = pc.binary_length(plain).fill_null(0).to_numpy().astype(np.int64)
    if "base_turn" in turns.column_names:
        rooted = turns.column("base_turn").is_null().to_numpy()
        for row in np.flatnonzero((n_bytes % 4 != 0) | (n_bytes > 0) & ~rooted)[:1]:
            raise InvalidTurnsError(
                f"session {turns.column('session_id')[int(row)]}, table row {row}: "
                f"{NAME} of {n_bytes[row]} bytes: expected whole ids of four bytes, in "
                "a turn without a base_turn"
            )
    first = b"".join(x for x in plain.drop_null().to_pylist())
    lists = turns.column("suffix_ids")
    n_own = pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)
    own = pa.chunked_array([c.flatten() for c in lists.chunks], kind.value_type)
    # ids that are none (null, or too large) stay as they are: readers tell their place
    wide = np.int32 if kind.value_type == pa.int32() else np.int64
    n_first = n_bytes // 4
    ends = np.zeros(len(turns) + 1, np.int64)
    np.cumsum(n_first + n_own, out=ends[1:])
    ids = np.empty(int(ends[-1]), wide)
    ids[_places(ends[:-1], n_first)] = np.frombuffer(first, "<i4")
    behind = _places(ends[:-1] + n_first, n_own)
    ids[behind] = own.fill_null(0).to_numpy()
    absent = None
    if own.null_count:
        absent = np.zeros(len(ids), np.bool_)
        absent[behind] = own.is_null().to_numpy()
    at = turns.column_names.index("suffix_ids")
    array = pa.LargeListArray.from_arrays(
        pa.array(ends),
        pa.array(ids, mask=absent),
        mask=lists.is_null().combine_chunks() if lists.null_count else None,
    )
    fresh = turns.set_column(at, turns.field(at).with_type(array.type), array)
    return fresh.drop_columns([NAME])


def _is_bytes(type_: pa.DataType) -> bool:
    return any(
        test(type_)
        for test in (
            pa.types.is_null,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
            pa.types.is_binary_view,
        )
    )


def _places(
    starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The positions of runs that start there and are so long, end to end."""
    before = np.cumsum(sizes) - sizes
    places: npt.NDArray[np.int64] = np.repeat(starts - before, sizes)
    return places + np.arange(int(sizes.sum()))
