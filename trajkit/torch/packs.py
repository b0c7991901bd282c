"""Packs as tensors: their dataset, and losses as sums over their edges.

Each loss returns one sum. Sums over the packs of a step add up; divide by what the loss is
a mean of, such as the number of rollouts in the step. What `trajkit.learn.reference_loss`
gives for the rows is what these give for their packs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trajkit._arguments import check_choice
from trajkit.errors import InvalidTurnsError, LayoutError, SchemaError
from trajkit.schema import PACKS
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.turns.images import has_items

Head: TypeAlias = Callable[[Tensor], Tensor]
"""From hidden states to logits, such as a model's output projection."""
Ratio: TypeAlias = Literal["token", "sequence"]


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


_TENSORS = Pack.__slots__[:-2]  # all but next_source and columns
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

    Raises
    ------
    SchemaError
        A column is absent or of another type.
    InvalidTurnsError
        A pack has images, whose pixels no tensor has, or continues a tree
        (``oversize="carry"``) that the line before does not have.
    """

    def __init__(self, packs: TableLike) -> None:
        self._table = table = canonical(as_table(packs), PACKS)
        if has_items(table):
            line = int(np.flatnonzero(table.column("mm_items").is_valid())[0])
            raise InvalidTurnsError(
                f"pack {line} has images, whose pixels a model would not get: leave out "
                "their sessions before packing, or train on rows"
            )
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
        return Pack(**values, columns=columns)

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
        return replace(nothing, **_padding())


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


def gather_logprobs(
    hidden: Tensor,
    lm_head: Head,
    pack: Pack,
    *,
    temperature: float = 1.0,
    chunk_size: int = 2048,
) -> Tensor:
    """The logprob of each edge's target after its source.

    Logits exist for ``chunk_size`` tokens at a time, and only of tokens that are the
    source of an edge, once each: the backward pass computes them again. Softmax runs
    in at least float32.

    Parameters
    ----------
    hidden : float tensor, shape (n_tokens, width) or (1, n_tokens, width)
        The model's last hidden states, after its last norm; LayoutError without one for
        each token of the pack.
    lm_head : callable
        From hidden states of shape (k, width) to logits of shape (k, n_vocabulary).
    pack : Pack
    temperature : float
        The logits are divided by it, as the engine did when it sampled.
    chunk_size : int
        Sources a chunk; memory for logits is a few times ``chunk_size * n_vocabulary``.

    Returns
    -------
    float tensor, shape (n_edges,)
        On the device of ``hidden``, in the order of the pack's edges.
    """
    n = len(pack.input_ids)
    if hidden.shape[:-1] not in ((n,), (1, n)):
        raise LayoutError(
            f"hidden states of shape {tuple(hidden.shape)} for a pack of {n} tokens"
        )
    # Sizes of chunks are needed on the host, where packs come from.
    source, slot, counts = torch.unique(
        pack.edge_source.cpu(), return_inverse=True, return_counts=True
    )
    order = torch.argsort(slot, stable=True)
    # One chunk at least: without an edge, the head takes part with zero gradients.
    sizes = [int(count.sum()) for count in counts.split(chunk_size)]
    slot, target = slot[order] % chunk_size, pack.edge_target.cpu()[order]
    source, slot, target, places = (
        x.to(hidden.device, non_blocking=True)
        for x in (source, slot, target, torch.argsort(order))
    )
    states = hidden.reshape(n, hidden.shape[-1])[source].split(chunk_size)
    chunks = zip(states, slot.split(sizes), target.split(sizes), strict=True)
    parts = [
        checkpoint(_chunk, *chunk, lm_head, temperature, use_reentrant=False)
        for chunk in chunks
    ]
    return torch.cat(parts)[places]


def _chunk(
    states: Tensor, slot: Tensor, target: Tensor, lm_head: Head, temperature: float
) -> Tensor:
    logits = lm_head(states)
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide) / temperature
    total: Tensor = logits.logsumexp(1)
    return logits[slot, target] - total[slot]


def policy_loss(
    logprobs: Tensor,
    pack: Pack,
    *,
    clip: tuple[float, float] | None = None,
    ratio: Ratio = "token",
    advantage: str = "advantage",
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """The policy-gradient loss with importance ratios, summed over edges.

    With ``w`` the edge's weight, ``A`` its advantage and ``r`` its ratio::

        sum over edges of  -w * min(r * A, clamp(r, 1 - low, 1 + high) * A)

    Parameters
    ----------
    logprobs : float tensor, shape (n_edges,)
        As `gather_logprobs` gives them.
    pack : Pack
    clip : (low, high), optional
        Distances from 1 at which ratios are clipped (PPO's clipped objective; unequal
        ones are DAPO's). Default: no clipping, as in `reference_loss`.
    ratio : {"token", "sequence"}
        "token": each edge's own, ``exp(logprob - old)``. "sequence": the geometric mean
        over the edges of its row that have a weight, for all of them (GSPO, equation 7).
    advantage : str
        The column that holds it.
    old_logprobs : float tensor, shape (n_edges,), optional
        Logprobs of the behaviour policy. Default: those recorded by the engine.

    Raises
    ------
    InvalidTurnsError
        An edge with a weight has an advantage or a logprob of the behaviour policy that
        is null, NaN or infinite. An edge with a weight of 0 may have any.
    LayoutError
        ``logprobs`` is not one value for each edge; or a ratio of sequences is asked for
        a part of a tree that was cut.
    """
    check_choice("ratio", ratio, Ratio)
    if ratio == "sequence" and pack.is_part:
        raise LayoutError(
            "ratio='sequence' needs all edges of a row in one pack, and a tree of this "
            "one goes on in another: pack with oversize='repeat'"
        )
    weight = _finite(logprobs, pack, "row_weight", pack.edge_weight)
    used = weight != 0
    value = _finite(logprobs, pack, advantage, pack.column(advantage), used)
    name = "logprob" if old_logprobs is None else "old logprob"
    old = pack.edge_logprob if old_logprobs is None else old_logprobs
    old = _finite(logprobs, pack, name, old, used)
    difference = torch.where(used, logprobs - old, 0.0)
    if ratio == "sequence":
        _, row = torch.unique(pack.edge_row.to(used.device), return_inverse=True)
        total, count = (
            torch.zeros_like(difference).index_add(0, row, x.to(difference))
            for x in (difference, used)
        )
        difference = torch.where(used, (total / count.clamp(min=1))[row], 0.0)
    ratios = difference.exp()
    gain = ratios * value
    if clip is not None:
        low, high = clip
        gain = torch.minimum(gain, ratios.clamp(1 - low, 1 + high) * value)
    return -(weight * gain).sum()


def nll_loss(logprobs: Tensor, pack: Pack) -> Tensor:
    """The negative log-likelihood, weighed: ``sum over edges of -w * logprob``.

    Parameters
    ----------
    logprobs, pack
        As for `policy_loss`, and so is what is raised.
    """
    return _weighed(logprobs, _finite(logprobs, pack, "row_weight", pack.edge_weight))


def observation_loss(logprobs: Tensor, pack: Pack) -> Tensor:
    """The loss of observed tokens: ``sum over edges of -v * logprob``, as `nll_loss`.

    Parameters
    ----------
    logprobs, pack
        As for `policy_loss`; ``v`` is the pack's column ``observation_weight``.
    """
    weight = pack.column("observation_weight")
    return _weighed(logprobs, _finite(logprobs, pack, "observation_weight", weight))


def _weighed(logprobs: Tensor, weight: Tensor) -> Tensor:
    # An edge without a weight has no part in the loss, whatever its logprob.
    return -(weight * torch.where(weight != 0, logprobs, 0.0)).sum()


def _finite(
    logprobs: Tensor,
    pack: Pack,
    name: str,
    values: Tensor,
    used: Tensor | None = None,
) -> Tensor:
    """Values of edges as ``logprobs``; 0 where not used."""
    if logprobs.shape != pack.edge_source.shape:
        raise LayoutError(
            f"logprobs of shape {tuple(logprobs.shape)} for {len(pack.edge_source)} edges"
        )
    values = values.to(logprobs.device)
    bad = ~torch.isfinite(values) & (True if used is None else used)
    if bool(bad.any()):
        edge = int(bad.nonzero()[0])
        value = float(values[edge])
        rows = pack.edge_row[bad.to(pack.edge_row.device)].unique().tolist()
        listed = ", ".join(map(str, rows[:10])) + (" ..." if len(rows) > 10 else "")
        raise InvalidTurnsError(
            f"{name} is {'null or NaN' if math.isnan(value) else value} for {len(rows)} "
            f"of the pack's rows ({listed}), first at edge {edge} (row "
            f"{int(pack.edge_row[edge])}, position {int(pack.edge_position[edge])}): give "
            "these rows a number, or leave them out before packing"
        )
    values = values.to(logprobs.dtype)
    return values if used is None else torch.where(used, values, 0.0)
