"""Tables of packs and of rows as torch datasets."""

from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trajkit._arrow.canonical import TableLike, as_table
from trajkit.errors import SchemaError
from trajkit.torch.packs import Pack

_PER_TOKEN = ("input_ids", "position_ids", "subtree_end")
_PER_EDGE = ("edge_source", "edge_target", "edge_row", "edge_position", "edge_weight")


class PackDataset(Dataset[Pack]):
    """The packs of a table, one `Pack` an item.

    A pack is a micro-batch, so a DataLoader needs ``batch_size=None``.

    Parameters
    ----------
    packs : table
        `trajkit.schema.PACKS`, with any further ``edge_`` columns.
    """

    def __init__(self, packs: TableLike) -> None:
        self._table = as_table(packs)
        missing = {*_PER_TOKEN, *_PER_EDGE, "edge_logprob"}
        missing -= set(self._table.column_names)
        if missing:
            raise SchemaError(f"packs lack the columns {sorted(missing)}")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Pack:
        line = self._table.slice(range(len(self))[index], 1)
        values: dict[str, Any] = {
            name: _tensor(_element(line, name)) for name in _PER_TOKEN
        }
        columns = {}
        for name in line.column_names:
            if name.startswith("edge_"):
                value = _tensor(_element(line, name))
                if name in {*_PER_EDGE, "edge_logprob"}:
                    values[name] = value
                else:
                    columns[name.removeprefix("edge_")] = value
        for name in ("edge_source", "edge_target", "edge_row", "edge_position"):
            # torch indexes with int64
            values[name] = values[name].long()
        for name in ("edge_weight", "edge_logprob"):
            values[name] = values[name].double()
        return Pack(**values, columns=columns)


def _element(line: pa.Table, name: str) -> pa.Array:
    """The list in a column of a table of one line."""
    return line.column(name).chunk(0).flatten()


def _tensor(values: pa.Array) -> Tensor:
    """An Arrow array as a tensor: its own memory where it has no null and no bits."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
        return _tensor(values).bool()
    if values.null_count:
        if not pa.types.is_floating(values.type):
            raise SchemaError(
                f"{values.null_count} nulls in a column of {values.type}: torch has no "
                "null for it"
            )
        values = values.fill_null(float("nan"))
    return torch.from_dlpack(values)
