"""A model as a module from packs to logprobs, for wrappers that average gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trajkit.torch.attention import Kernel
from trajkit.torch.checks import Check, unwrapped
from trajkit.torch.datasets import Pack
from trajkit.torch.models import check_single_rank, edge_logprobs


class PackedModel(torch.nn.Module):  # type: ignore[misc]
    """A module whose forward takes a pack and gives the logprobs of its edges.

    Wrappers for several devices work in their own forward and so must wrap a module that
    takes the pack: ``DistributedDataParallel(PackedModel(model))``, ``fully_shard`` of the
    layers and then of ``PackedModel(model)``, ``accelerator.prepare`` or a Trainer.

    Parameters
    ----------
    model : PreTrainedModel
        As for `edge_logprobs`; also with adapters (PEFT).
    temperature, chunk_size, kernel, kernel_options, check
        As for `edge_logprobs`.
    local : bool
        Several ranks may call the module without a wrapper that this class knows
        (`DistributedDataParallel`, FSDP2), because the caller reduces gradients.

    Raises
    ------
    UnsupportedModelError
        ``model`` is itself in a wrapper, or is no model of transformers.

    Notes
    -----
    Attributes that the module lacks are those of ``model``, such as ``config``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        temperature: float = 1.0,
        chunk_size: int = 2048,
        kernel: Kernel = "masked",
        kernel_options: dict[str, Any] | None = None,
        check: Check = "once",
        local: bool = False,
    ) -> None:
        super().__init__()
        unwrapped(model)
        self.model = model
        self.local = local
        self._options: dict[str, Any] = {
            "temperature": temperature,
            "chunk_size": chunk_size,
            "kernel": kernel,
            "kernel_options": kernel_options,
            "check": check,
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, pack: Pack) -> Tensor:
        """The logprob of each edge: `edge_logprobs` of the model."""
        wrapped = (
            isinstance(self, FSDPModule)
            or isinstance(unwrapped(self.model), FSDPModule)
            or DistributedDataParallel._active_ddp_module is not None
        )
        if not (wrapped or self.local):
            check_single_rank()
        # Masks are built on the host. Layers that are compiled themselves stay so.
        run = torch.compiler.disable(edge_logprobs)
        found: Tensor = run(self.model, pack, local=True, **self._options)
        return found
