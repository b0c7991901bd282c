"""A table of packs as a torch dataset."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trajkit._arguments import check_choice
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import PACKS
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.turns.images import Item, engine_ids, has_items

Images: TypeAlias = Literal["error", "items"]


@dataclass(frozen=True, slots=True)
class Pack:
    """One line of a packs table as tensors; `trajkit.schema.PACKS` says what they hold.

    Attributes
    ----------
    input_ids, position_ids, subtree_end : int32 tensors, shape (n_tokens,)
    edge_source, edge_target, edge_row, edge_position : int64 tensors, shape (n_edges,)
    edge_weight, edge_logprob : float64 tensors, shape (n_edges,)
        NaN where the engine gave no logprob.
    prefix_source, prefix_end : int64 and int32 tensors, shape (n_prefix,)
        Empty unless the pack continues a tree of the pack before it.
    next_source : int64 tensor, shape (n_handed,)
        ``prefix_source`` of the pack that continues a tree of this one. Empty if none does.
    columns : mapping of str to tensor, each of shape (n_edges,)
        Further ``edge_`` columns by name without the prefix, such as ``advantage``.
    mm_items : sequence of dict
        `trajkit.schema.MM_ITEM`, if the dataset was asked for images.
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
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: function(x) for k, x in values.items() if isinstance(x, Tensor)}
        columns = {name: function(x) for name, x in self.columns.items()}
        return replace(self, **tensors, columns=columns)

    def column(self, name: str) -> Tensor:
        """A further column of the edges, or SchemaError."""
        if name not in self.columns:
            raise SchemaError(
                f"the pack has no column edge_{name}: name {name!r} in columns= of "
                f"trajkit.pack (it has {sorted(self.columns)})"
            )
        return self.columns[name]


_TENSORS = Pack.__slots__[:-3]  # all but next_source, columns and mm_items
_INT32 = ("input_ids", "position_ids", "subtree_end", "prefix_end")


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
        A dataset has no pixels. "error": refuse packs with images. "items": add
        ``mm_items`` to each pack, for a model that gets the pixels from there; ids are
        the engine's, with one placeholder per token of an image.

    Raises
    ------
    SchemaError
        A column is absent or of another type.
    InvalidTurnsError
        A pack has images that are refused, or continues a tree (``oversize="carry"``)
        that the line before does not have.
    """

    def __init__(self, packs: TableLike, *, images: Images = "error") -> None:
        check_choice("images", images, Images)
        table = canonical(as_table(packs), PACKS)
        if has_items(table):
            if images == "error":
                line = int(np.flatnonzero(table.column("mm_items").is_valid())[0])
                raise InvalidTurnsError(
                    f"pack {line} has images, and a dataset no pixels: pass "
                    "images='items' if the model gets them from mm_items of each item"
                )
            table = engine_ids(table)
        self._table = table
        self._images = images
        self._continues = np.asarray(table.column("prefix_pack").is_valid())
        for line in np.flatnonzero(self._continues).tolist():
            source = _values(table, line, "prefix_source")
            reach, end = (
                _values(table, max(line - 1, 0), name).to_numpy()
                for name in ("prefix_end", "subtree_end")
            )
            # the path to the last token of the line before
            path = np.flatnonzero(np.append(reach, end) == len(end))
            if line == 0 or not np.array_equal(source, path[: len(source)]):
                raise InvalidTurnsError(
                    f"pack {line} continues a tree of pack {table['prefix_pack'][line]}, "
                    "which must be the line before it: keep packs of a tree in order"
                )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Pack:
        line = range(len(self))[index]
        names = self._table.column_names
        more = [n for n in names if n.startswith("edge_") and n not in _TENSORS]
        values = {n: _tensor(self._table, line, n) for n in [*_TENSORS, *more]}
        values["next_source"] = values["prefix_source"][:0]
        if line + 1 < len(self):
            values["next_source"] = _tensor(self._table, line + 1, "prefix_source")
        for name in {*_TENSORS, "next_source"}.difference(_INT32):
            # torch indexes with int64, and losses are summed in the widest type
            x = values[name]
            values[name] = x.double() if x.is_floating_point() else x.long()
        columns = {name.removeprefix("edge_"): values.pop(name) for name in more}
        if not len(values["input_ids"]):
            values |= _padding()
        items = self._table["mm_items"][line].as_py() if self._images == "items" else ()
        return Pack(**values, columns=columns, mm_items=items or [])

    def parts(self) -> list[list[int]]:
        """The packs that must run together, for each of the trees in several packs.

        A pack of complete trees is alone in its list. `carry_backward` takes the packs of
        one; so does a DataLoader, with the lists as its ``batch_sampler`` and
        ``collate_fn=list``.
        """
        first = np.flatnonzero(~self._continues)
        return [x.tolist() for x in np.split(np.arange(len(self)), first[1:])]

    def empty_pack(self) -> Pack:
        """One token of padding without an edge, for ranks without a pack in a step.

        `trajkit.balance` names them null. The rank takes part in forward and backward,
        and every parameter gets a gradient of zero.
        """
        nothing = self[0].map(lambda values: values[:0])
        return replace(nothing, **_padding(), mm_items=())


def _padding() -> dict[str, Tensor]:
    one = torch.ones(1, dtype=torch.int32)
    return {"input_ids": one - 1, "position_ids": one - 1, "subtree_end": one}


def _values(packs: pa.Table, line: int, name: str) -> pa.Array:
    return packs.slice(line, 1).column(name).chunk(0).flatten()


def _tensor(packs: pa.Table, line: int, name: str) -> Tensor:
    """A value of a table as a tensor, in Arrow's memory if it has no nulls or bits."""
    values = _values(packs, line, name)
    bits = pa.types.is_boolean(values.type)
    if bits:
        values = values.cast(pa.uint8())
    if pa.types.is_floating(values.type):
        values = values.fill_null(float("nan"))
    elif values.null_count or not pa.types.is_integer(values.type):
        raise SchemaError(
            f"pack {line}: {name} has {values.null_count} nulls of type {values.type}: "
            "tensors hold numbers, and a null only as a float's NaN"
        )
    tensor: Tensor = torch.from_dlpack(values)
    return tensor.bool() if bits else tensor
