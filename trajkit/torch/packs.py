"""A pack as torch tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from trajkit.errors import SchemaError
from trajkit.turns.images import Item


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
