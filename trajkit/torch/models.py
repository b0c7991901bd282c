"""A pack as a model's inputs, and the logprobs that the model gives its edges."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch.attention import Kernel, TreeAttention, tensor_masks
from trajkit.torch.checks import (
    Check,
    check_known,
    check_lengths,
    chooses_tokens,
    layers_of,
    swapped,
    try_model,
    unwrapped,
)
from trajkit.torch.datasets import Pack
from trajkit.torch.losses import gather_logprobs
from trajkit.torch.states import CarriedStates, States, follows


class Options(TypedDict, total=False):
    """How a model runs on packs: see `edge_logprobs`."""

    kernel: Kernel
    kernel_options: dict[str, Any] | None
    temperature: float
    chunk_size: int
    check: Check
    local: bool


@dataclass(frozen=True, slots=True)
class _Options:
    kernel: Kernel = "masked"
    kernel_options: dict[str, Any] | None = None
    temperature: float = 1.0
    chunk_size: int = 2048
    check: Check = "once"
    local: bool = False


def check_model(model: torch.nn.Module, *, check: Check = "once") -> None:
    """Checks that a model gives the tokens of a tree what it gives those of its rows.

    First it looks for what is known to be wrong. Then it makes a trial: a small tree of
    three branches, longer than the windows of the model, as a pack and as rows through
    the model's own forward with its own attention, and compares the logprobs. The trial
    changes no weight, gradient, flag or random state.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, or one compiled or with adapters (PEFT),
        loaded with ``attn_implementation="trajkit"``.
    check : {"always", "once", "never"}
        When to make the trial. "once": unless the model passed it and has the layers,
        hooks and configuration of then. A model on the meta device is not tried.

    Raises
    ------
    UnsupportedModelError
        Naming the first of these that the model has:

        - an attention that is not ``"trajkit"``: flash attention cannot express the
          mask, and others would derive one from the positions;
        - layers with a state that cannot start at a branch (Mamba 1, lightning attention);
        - heads that predict several tokens ahead, along the layout of the pack;
        - dropout, or other random numbers, in training mode;
        - logprobs of a tree that are not those of its rows.

    Notes
    -----
    Auxiliary losses of a mixture of experts count each token of the pack once, where
    rows count a shared token in every row. They are no part of the logprobs; leave
    ``output_router_logits`` off, or accept another weighting.
    """
    _ready(model, _Options(check=check, local=True))


def model_inputs(
    model: torch.nn.Module, pack: Pack, **options: Unpack[Options]
) -> dict[str, Any]:
    """Keyword arguments with which a model runs on a pack.

    Parameters
    ----------
    model, pack, **options
        As for `edge_logprobs`.

    Returns
    -------
    dict
        ``input_ids``, ``attention_mask`` (all true) and ``position_ids`` of shape
        (1, n_tokens) on the model's device, ``tree`` and ``use_cache=False``.

    Raises
    ------
    UnsupportedModelError, LayoutError
        As for `edge_logprobs`.
    """
    chosen = _Options(**options)
    return _inputs(_ready(model, chosen), pack, chosen)


def edge_logprobs(
    model: torch.nn.Module, pack: Pack, **options: Unpack[Options]
) -> Tensor:
    """The logprob that a model gives the target of each edge of a pack.

    Logits are what the model's own forward makes of its last hidden states, with soft
    caps and scales.

    Parameters
    ----------
    model : PreTrainedModel
        As for `check_model`, which looks at it.
    pack : Pack
        Its masks are built on the CPU, so pass the pack as the dataset gives it.
    **options
        ``kernel`` ("masked") and ``kernel_options`` (None) are those of `TreeAttention`,
        ``temperature`` (1.0) and ``chunk_size`` (2048) of `gather_logprobs`, ``check``
        ("once") of `check_model`. With ``local`` (False) gradients stay on this rank, or
        the caller reduces them; without it a model that several ranks train must be in a
        wrapper: see `PackedModel`.

    Returns
    -------
    float tensor, shape (n_edges,)

    Raises
    ------
    UnsupportedModelError
        As for `check_model`; or RoPE has frequencies of the longest row, and a row of
        the pack is long enough to change them.
    LayoutError
        A tree of the pack continues in another pack (see `carry_backward`); or several
        ranks run, and the model is not in a wrapper.
    """
    chosen = _Options(**options)
    causal = _ready(model, chosen)
    found: Tensor = _inside(causal, lambda: _logprobs(causal, pack, chosen))
    return found


def _ready(model: torch.nn.Module, options: _Options) -> PreTrainedModel:
    """The transformers model in ``model``, after all checks."""
    causal = check_known(model)
    if not (options.local or isinstance(causal, FSDPModule)):
        _check_single_rank()
    tried = _Options(options.kernel, options.kernel_options)

    def trial() -> None:
        try_model(
            model, options.check, tried, lambda pack: _logprobs(causal, pack, tried)
        )

    _inside(causal, trial)
    return causal


def _check_single_rank() -> None:
    """Raise if other ranks train the model, too."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if (n := distributed.get_world_size()) > 1:
        raise LayoutError(
            f"{n} ranks run, and nothing would average their gradients: wrap "
            "trajkit.torch.PackedModel(model) in DistributedDataParallel, fully_shard or "
            "a trainer and call it with a pack, or pass local=True if you reduce "
            "gradients by yourself"
        )


def _inside(model: PreTrainedModel, function: Callable[[], Any]) -> Any:
    """Calls a function as a forward of the model, so that FSDP2 gathers its weights."""
    if not isinstance(model, FSDPModule):
        return function()
    if "trajkit_forward" not in vars(model):
        model.trajkit_forward = lambda function: function()
        register_fsdp_forward_method(model, "trajkit_forward")
    return model.trajkit_forward(function)


def _inputs(
    model: PreTrainedModel,
    pack: Pack,
    options: _Options,
    carried: CarriedStates | None = None,
) -> dict[str, Any]:
    check_lengths(model, 1 + int(pack.position_ids.max()))
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    ids = pack.input_ids[None].to(device)
    unused = getattr(embeddings, "padding_idx", None)
    if unused is not None:
        # The embedding of padding is zero, where norms of some models have no gradient.
        alone = pack.subtree_end == torch.arange(1, 1 + len(pack.subtree_end))
        padding = (alone & (pack.position_ids == 0)).to(device) & (ids == unused)
        ids = torch.where(padding, (unused + 1) % len(embeddings.weight), ids)
    return {
        "input_ids": ids,
        # without it, models guess packed rows from positions that go back
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "position_ids": pack.position_ids[None].to(device),
        "tree": TreeAttention(
            pack, device, options.kernel, options.kernel_options, carried
        ),
        "use_cache": False,
    }


def _outputs(
    model: PreTrainedModel,
    pack: Pack,
    options: _Options,
    carried: CarriedStates | None = None,
) -> Any:
    inputs = _inputs(model, pack, options, carried)
    chooses = chooses_tokens(model)
    with tensor_masks(inputs["tree"]) if chooses else contextlib.nullcontext():
        return layers_of(model)(**inputs)


def _logprobs(
    model: PreTrainedModel,
    pack: Pack,
    options: _Options,
    carried: CarriedStates | None = None,
) -> Tensor:
    outputs = _outputs(model, pack, options, carried)
    kind = type(outputs)

    def head(states: Tensor) -> Tensor:
        """The model's forward after its layers, whatever it does there."""

        def layers(*args: Any, **kwargs: Any) -> Any:
            return kind(last_hidden_state=states[None])

        # not the call of the model: its hooks run once, for the pack
        with swapped([layers_of(model)], "forward", layers):
            none = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
            logits: Tensor = model.forward(input_ids=none, use_cache=False).logits[0]
        return logits

    return gather_logprobs(
        outputs.last_hidden_state,
        head,
        pack,
        temperature=options.temperature,
        chunk_size=options.chunk_size,
    )


def carry_logprobs(
    model: torch.nn.Module, parts: Sequence[Pack], **options: Unpack[Options]
) -> list[Tensor]:
    """As `edge_logprobs`, without gradients, for the packs of a tree in several packs.

    Each pack runs once. Keys and values of the tokens that the next pack attends are
    kept in between.

    Parameters
    ----------
    model, **options
        As for `edge_logprobs`.
    parts : sequence of Pack
        The packs of one list of `PackDataset.parts`, in order.

    Returns
    -------
    list of float tensor, each of shape (n_edges,)

    Raises
    ------
    UnsupportedModelError
        As for `edge_logprobs`; or the model has layers with a state, which would have to
        be carried as well; or layers that choose tokens; or it runs a layer twice.
    LayoutError
        The packs are not all parts of one tree, in order.
    """
    chosen = _Options(**options)
    causal = _ready(model, chosen)
    _check_parts(causal, parts)
    found = []
    states: States = {}
    with torch.no_grad():
        for pack in parts:
            carried = CarriedStates(pack, states)
            found.append(_logprobs(causal, pack, chosen, carried))
            states = carried.handed
    return found


def carry_backward(
    model: torch.nn.Module,
    parts: Sequence[Pack],
    loss: Callable[[Tensor, Pack], Tensor],
    **options: Unpack[Options],
) -> Tensor:
    """Forward and backward of a tree in several packs, with one pack in memory at a time.

    The packs run forward without gradients, and keys and values of the tokens that the
    next pack attends are kept. Then, from the last pack to the first, each runs again
    with gradients, and the gradients of its prefix are added to those of the pack that
    computed it. So every pack but the last runs forward twice. A pack with complete
    trees runs once.

    Parameters
    ----------
    model, parts, **options
        As for `carry_logprobs`. Gradients are added to ``grad`` of the parameters.
    loss : callable
        From the logprobs of a pack's edges and the pack to a scalar tensor. The losses
        of the packs are summed.

    Returns
    -------
    scalar tensor
        The sum, without a gradient.

    Raises
    ------
    UnsupportedModelError, LayoutError
        As for `carry_logprobs`.

    Notes
    -----
    Memory is that of the largest pack, and keys and values of one path of the tree for
    each cut. This is the schedule of "redundancy-free tree partitioning" (Tree Training,
    arXiv:2511.00413) and of DTA (arXiv:2602.00482), over the cuts of `trajkit.pack`.
    """
    chosen = _Options(**options)
    causal = _ready(model, chosen)
    _check_parts(causal, parts)
    prefixes: list[States] = [{}]
    with torch.no_grad():
        for pack in parts[:-1]:
            carried = CarriedStates(pack, prefixes[-1])
            _outputs(causal, pack, chosen, carried)
            prefixes.append(carried.handed)
    values = []
    gradients: States = {}
    for pack in reversed(parts):
        carried = CarriedStates(pack, prefixes.pop(), gradients)
        value = loss(_logprobs(causal, pack, chosen, carried), pack)
        value.backward()
        values.append(value.detach())
        gradients = carried.prefix_gradients()
    return torch.stack(values).sum()


def _check_parts(model: PreTrainedModel, parts: Sequence[Pack]) -> None:
    none = torch.empty(0, dtype=torch.int64)
    handed = [none, *(pack.next_source for pack in parts)]
    taken = [*(pack.prefix_source for pack in parts), none]
    for k, (one, other) in enumerate(zip(handed, taken, strict=True)):
        if not torch.equal(one.cpu(), other.cpu()):
            raise LayoutError(
                f"part {k} of {len(parts)} attends {len(other)} tokens before it, and "
                f"{len(one)} are handed to it: pass the packs of one list of "
                "PackDataset.parts(), all of them and in order"
            )
    carried = any(follows(module) for module in model.modules())
    if len(parts) > 1 and (carried or chooses_tokens(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with a state, or that choose tokens, and "
            "these are not carried from pack to pack: pack with oversize='repeat'"
        )


class PackedModel(torch.nn.Module):  # type: ignore[misc]
    """A module whose forward takes a pack and gives the logprobs of its edges.

    Wrappers for several devices work in their own forward and so must wrap a module that
    takes the pack: ``DistributedDataParallel(PackedModel(model))``, ``fully_shard`` of the
    layers and then of ``PackedModel(model)``, ``accelerator.prepare`` or a Trainer.

    Parameters
    ----------
    model, **options
        As for `edge_logprobs`. ``local``: several ranks may call the module without a
        wrapper that this class knows (`DistributedDataParallel`, FSDP2).

    Raises
    ------
    UnsupportedModelError
        ``model`` is itself in a wrapper, or is no model of transformers.

    Notes
    -----
    Attributes that the module lacks are those of ``model``, such as ``config``.
    """

    def __init__(self, model: torch.nn.Module, **options: Unpack[Options]) -> None:
        super().__init__()
        unwrapped(model)
        self.model = model
        self.local = _Options(**options).local
        self._options = {**options, "local": True}

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
            _check_single_rank()
        # Masks are built on the host. Layers that are compiled themselves stay so.
        run = torch.compiler.disable(edge_logprobs)
        found: Tensor = run(self.model, pack, **self._options)
        return found
