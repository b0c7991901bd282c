"""Tables of packs and of rows as torch datasets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import PACKS
from trajkit.tables.canonical import (
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    place,
)
from trajkit.turns.images import Item, engine_ids, has_items


@dataclass(frozen=True, slots=True)
class Pack:
    """One line of a packs table (`trajkit.schema.PACKS`) as tensors.

    Attributes
    ----------
    input_ids : int32 tensor, shape (n_tokens,)
    position_ids : int32 tensor, shape (n_tokens,)
        The depth of each token in its tree, which is its position in its rows.
    subtree_end : int32 tensor, shape (n_tokens,)
        The mask: ``q`` attends ``kv`` where ``kv <= q < subtree_end[kv]``.
    edge_source : int64 tensor, shape (n_edges,)
        The token of the pack whose hidden state predicts the edge's target.
    edge_target : int64 tensor, shape (n_edges,)
        Token ids.
    edge_row, edge_position : int64 tensors, shape (n_edges,)
        Line of the rows table, and the target's position in that row.
    edge_weight : float64 tensor, shape (n_edges,)
    edge_logprob : float64 tensor, shape (n_edges,)
        The logprob recorded by the engine; NaN where it gave none.
    prefix_source, prefix_end : int64 and int32 tensors, shape (n_prefix,)
        For a pack that continues a tree of the pack before it: as in the table. Empty
        otherwise.
    next_source : int64 tensor, shape (n_handed,)
        ``prefix_source`` of the pack that continues a tree of this one. Empty if none does.
    columns : mapping of str to tensor, each of shape (n_edges,)
        Further ``edge_`` columns by name without the prefix, such as ``advantage``.
    mm_items : sequence of dict
        The images of the pack by position, if the dataset was asked for them:
        `trajkit.schema.MM_ITEM`.
    """

    input_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    edge_source: Tensor
    edge_target: Tensor
    edge_row: Tensor
    edge_position: Tensor
    edge_weight: Tensor
    edge_logprob: Tensor
    prefix_source: Tensor
    prefix_end: Tensor
    next_source: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    mm_items: Sequence[Item] = ()

    @property
    def is_part(self) -> bool:
        """Whether a tree of the pack is continued from or in another pack."""
        return len(self.prefix_source) + len(self.next_source) > 0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Pack":
        """The pack with every tensor on a device."""
        return self.map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Pack":
        """The pack in page-locked memory; a DataLoader with ``pin_memory`` calls it."""
        return self.map(lambda x: x.pin_memory())

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pack":
        """The pack with a function applied to every tensor."""
        tensors = {
            f.name: function(getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("columns", "mm_items")
        }
        columns = {name: function(x) for name, x in self.columns.items()}
        return replace(self, **tensors, columns=columns)

    def column(self, name: str) -> Tensor:
        """A further column of the edges.

        Raises
        ------
        SchemaError
            The pack has no such column.
        """
        if name not in self.columns:
            raise SchemaError(
                f"the pack has no column edge_{name}: name {name!r} in columns= of "
                f"trajkit.pack (it has {sorted(self.columns)})"
            )
        return self.columns[name]


Images: TypeAlias = Literal["error", "items"]

_INT64 = (
    "edge_source",
    "edge_target",
    "edge_row",
    "edge_position",
    "prefix_source",
    "next_source",
)
_TENSORS = {*Pack.__slots__} - {"columns", "mm_items"}
_FLOAT64 = ("edge_weight", "edge_logprob")
_PADDING = {"input_ids": 0, "loss_mask": False, "logprobs": float("nan")}


class PackDataset:
    """The packs of a table, one `Pack` an item: a map-style dataset.

    A pack is a micro-batch, so a DataLoader needs ``batch_size=None``. Tokens, and
    columns that torch takes as they are, stay in Arrow's memory until they are pinned
    or moved.

    Parameters
    ----------
    packs : table
        `trajkit.schema.PACKS` and further ``edge_`` columns, from `trajkit.pack`.
    images : {"error", "items"}
        How to treat packs with images. Their ids are the engine's, with one placeholder
        per token of an image, and a dataset has no pixels.

        error
            Raise.
        items
            Add ``mm_items`` to each item, for a model that gets the pixels from there.

    Raises
    ------
    SchemaError
        A column is absent or of another type.
    InvalidTurnsError
        A pack has images, and ``images`` is "error".
        A pack continues a tree (``oversize="carry"``) that the line before does not
        have.
    """

    def __init__(self, packs: TableLike, *, images: Images = "error") -> None:
        self._table = _with_engine_ids(canonical(as_table(packs), PACKS), images)
        self._images = images
        self._continues = np.asarray(self._table.column("prefix_pack").is_valid())
        for line in np.flatnonzero(self._continues).tolist():
            _check_prefix(self._table, line)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Pack:
        line = self._table.slice(range(len(self))[index], 1)
        values = {
            name: _tensor(_element(line, name), f"pack {index}: {name}")
            for name in line.column_names
            if name.startswith("edge_") or name in _TENSORS
        }
        after = self._table.slice(range(len(self))[index] + 1, 1)
        values["next_source"] = torch.empty(0, dtype=torch.int64)
        if len(after):
            source = _element(after, "prefix_source")
            values["next_source"] = _tensor(source, f"pack {index + 1}: prefix_source")
        # torch indexes with int64, and losses are summed in the widest type
        values |= {name: values[name].long() for name in _INT64}
        values |= {name: values[name].double() for name in _FLOAT64}
        columns = {
            name.removeprefix("edge_"): values.pop(name)
            for name in [*values]
            if name not in Pack.__slots__
        }
        if not len(values["input_ids"]):
            values["input_ids"] = values["position_ids"] = torch.zeros(
                1, dtype=torch.int32
            )
            values["subtree_end"] = torch.ones(1, dtype=torch.int32)
        items = _items(line) if self._images == "items" else ()
        return Pack(**values, columns=columns, mm_items=items)

    def parts(self) -> list[list[int]]:
        """The packs that must run together, for each of the trees in several packs.

        A pack that holds complete trees is alone in its list. `carry_backward` takes the
        packs of one list; as the ``batch_sampler`` of a DataLoader with
        ``collate_fn=list`` the lists give them.
        """
        first = np.flatnonzero(~self._continues)
        lines = np.arange(len(self))
        return [part.tolist() for part in np.split(lines, first[1:])]

    def empty_pack(self) -> Pack:
        """One token of padding without an edge, for ranks without a pack in a step.

        `trajkit.balance` names them null. The rank takes part in forward and backward,
        and every parameter gets a gradient of zero.
        """
        one = torch.zeros(1, dtype=torch.int32)
        return replace(
            self[0].map(lambda values: values[:0]),
            input_ids=one,
            position_ids=one,
            subtree_end=one + 1,
            mm_items=(),
        )


class RowDataset:
    """Rows one by one, for trainers that pad them (`pad_rows`).

    Each item maps ``input_ids``, ``loss_mask``, ``logprobs`` (NaN if unknown)
    and ``row_weight`` to tensors, and each of ``columns``.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`.
    columns : sequence of str
        Further columns, a number per row or per token, such as ``advantage``.
    images : {"error", "items"}
        As for `PackDataset`. With "items", each item also has a list ``mm_items``.

    Raises
    ------
    SchemaError
        A column is absent.
    InvalidTurnsError
        A row has images, and ``images`` is "error".
    """

    def __init__(
        self,
        rows: TableLike,
        columns: Sequence[str] = (),
        *,
        images: Images = "error",
    ) -> None:
        table = canonical_rows(as_table(rows))
        self._table = _with_engine_ids(table, images)
        self._images = images
        self._names = [*_PADDING, "row_weight", *columns]
        missing = [n for n in columns if n not in self._table.column_names]
        if missing:
            raise SchemaError(f"the rows have no columns {missing}")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self._table.slice(range(len(self))[index], 1)
        item: dict[str, Any] = {}
        for name in self._names:
            column = line.column(name)
            where = f"{place(line, 0)}: {name}"
            if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                item[name] = _tensor(_element(line, name), where)
            else:
                item[name] = _tensor(column.chunk(0), where)[0]
        if self._images == "items":
            item["mm_items"] = _items(line)
        return item


def pad_rows(
    rows: Sequence[dict[str, Any]], *, pad_id: int = 0, multiple_of: int = 1
) -> dict[str, Any]:
    """A batch of rows, padded on the right: the ``collate_fn`` of a `RowDataset`.

    Parameters
    ----------
    rows : sequence of dict
        Items of a `RowDataset`.
    pad_id : int
        The id of padding tokens.
    multiple_of : int
        The length of the batch is a multiple of it.

    Returns
    -------
    dict of str to tensor
        Values per token have shape (n_rows, length); beyond a row ``loss_mask`` is
        False, ``logprobs`` NaN and other columns 0. Values per row have shape (n_rows,).
        ``attention_mask`` (bool) and ``position_ids`` (int64) are added. ``mm_items`` is
        a list of the rows' lists.
    """
    multiple_of = chosen_int("multiple_of", multiple_of, 1)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    length = -(-int(lengths.max()) // multiple_of) * multiple_of
    index = torch.arange(length)
    batch: dict[str, Any] = {
        "attention_mask": index < lengths[:, None],
        "position_ids": index.expand(len(rows), length),
    }
    padding = _PADDING | {"input_ids": pad_id}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == "mm_items":
            batch[name] = values
            continue
        if values[0].ndim == 0:
            batch[name] = torch.stack(values)
            continue
        batch[name] = values[0].new_full((len(rows), length), padding.get(name, 0))
        for line, value in zip(batch[name], values, strict=True):
            line[: len(value)] = value
    return batch


def _with_engine_ids(table: pa.Table, images: Images) -> pa.Table:
    """Packs or rows with the ids that the engine consumed."""
    check_choice("images", images, Images)
    if not has_items(table):
        return table
    if images == "error":
        line = int(np.flatnonzero(table.column("mm_items").is_valid())[0])
        where = f"pack {line}" if "subtree_end" in table.column_names else ""
        raise InvalidTurnsError(
            f"{where or place(table, line)} has images: the dataset gives the engine's "
            "placeholder ids and no pixels. Pass images='items' if the model gets the "
            "pixels from mm_items, which each item then has"
        )
    return engine_ids(table)


def _items(line: pa.Table) -> list[Item]:
    return line.column("mm_items")[0].as_py() or []


def _check_prefix(packs: pa.Table, line: int) -> None:
    """Raise unless the prefix of a pack is the path at the end of the line before it."""
    source = _element(packs.slice(line, 1), "prefix_source").to_numpy()
    before = packs.slice(max(line - 1, 0), 1)
    own, prefix = (
        _element(before, name).to_numpy() for name in ("subtree_end", "prefix_end")
    )
    positions = _element(before, "position_ids").to_numpy()
    positions = np.concatenate([np.arange(len(prefix)), positions])
    ends = np.concatenate([prefix, own])
    if (
        line == 0
        or not np.all(source < len(ends))
        or not np.array_equal(positions[source], np.arange(len(source)))
        or np.any(ends[source] != len(own))
    ):
        raise InvalidTurnsError(
            f"pack {line} continues a tree of pack {packs['prefix_pack'][line]}, which "
            "must be the line before it: keep the packs of a tree together and in order"
        )


def _element(line: pa.Table, name: str) -> pa.Array:
    return line.column(name).chunk(0).flatten()


def _tensor(values: pa.Array, where: str) -> Tensor:
    """An Arrow array as a tensor, in its own memory if it has neither nulls nor bits."""
    if pa.types.is_boolean(values.type):
        return _tensor(values.cast(pa.uint8()), where).bool()
    if pa.types.is_floating(values.type):
        values = values.fill_null(float("nan"))
    elif values.null_count or not pa.types.is_integer(values.type):
        raise SchemaError(
            f"{where} has {values.null_count} nulls of type {values.type}: tensors hold "
            "numbers, and a null only as a float's NaN"
        )
    tensor: Tensor = torch.from_dlpack(values)
    return tensor
