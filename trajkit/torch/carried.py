"""Keys and values that the packs of a cut tree take from the packs before them."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from trajkit.errors import UnsupportedModelError
from trajkit.torch.packs import Pack

States: TypeAlias = dict[torch.nn.Module, tuple[Tensor, Tensor]]
"""Per attention layer two tensors of shape (1, n_key_heads, n_prefix, head_dim)."""


class CarriedStates:
    """What the attention layers of one pack take from the pack before and hand to the next.

    Under `torch.no_grad`, ``handed`` is filled for the next pack. Otherwise the prefix
    gets gradients, and those of the next pack's prefix are added in the backward pass.

    Parameters
    ----------
    prefix : dict of layer to (key, value)
        ``handed`` of the pack before; empty for the first pack of a tree.
    gradients : dict of layer to (key, value), optional
        What `prefix_gradients` gave for the next pack.

    Attributes
    ----------
    handed : dict of layer to (key, value)
        Of the tokens that the next pack attends.
    """

    def __init__(
        self, pack: Pack, prefix: States, gradients: States | None = None
    ) -> None:
        self.handed: States = {}
        self._source = pack.next_source
        self._gradients = gradients or {}
        # Leaves: inside checkpointed layers, too, their gradients add up in ``grad``.
        with_grad = torch.is_grad_enabled()
        self._prefix = {
            layer: (
                key.detach().requires_grad_(with_grad),
                value.detach().requires_grad_(with_grad),
            )
            for layer, (key, value) in prefix.items()
        }

    def extend(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the prefix and of the pack, in this order.

        Raises
        ------
        UnsupportedModelError
            A layer runs more than once.
        """
        if layer in self._prefix:
            before = self._prefix[layer]
            key, value = (
                torch.cat([before[0], key], 2),
                torch.cat([before[1], value], 2),
            )
        if layer in self._gradients:
            handed = self._gradients[layer]
            key = _Handed.apply(key, self._source, handed[0])
            value = _Handed.apply(value, self._source, handed[1])
        elif len(self._source) and not torch.is_grad_enabled():
            if layer in self.handed:
                raise UnsupportedModelError(
                    f"{type(layer).__name__} runs twice in one forward pass, so its keys "
                    "and values cannot be carried: pack with oversize='repeat'"
                )
            at = self._source.to(key.device)
            self.handed[layer] = key.index_select(2, at), value.index_select(2, at)
        return key, value

    def prefix_gradients(self) -> States:
        """The gradients of the prefix, after the backward pass."""
        found: States = {}
        for layer, (key, value) in self._prefix.items():
            assert key.grad is not None
            assert value.grad is not None
            found[layer] = key.grad, value.grad
        return found


class _Handed(torch.autograd.Function):  # type: ignore[misc]
    """Its first argument; its gradient also has that of tokens handed to another pack."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, handed: Tensor) -> Tensor:
        ctx.save_for_backward(source.to(x.device), handed)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        source, handed = ctx.saved_tensors
        return grad.index_add(2, source, handed), None, None
