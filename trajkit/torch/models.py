"""Which models train correctly on tree packs, and a pack as a model's inputs."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch.attention import ATTENTION, Kernel, TreeAttention
from trajkit.torch.carried import CarriedStates, States
from trajkit.torch.linear import carries_states, uncarried
from trajkit.torch.logprobs import gather_logprobs
from trajkit.torch.packs import Pack

# Layers that carry a state, or gather neighbours, along the layout of the pack.
_RECURRENT = re.compile(
    "Mamba|SSM|DeltaNet|LinearAttention|LightningAttention|Recurrent|RgLru|Rwkv"
    "|Retention|ShortConv|Indexer"
)
_MULTI_TOKEN = re.compile(r"(^|[._])(mtp|nextn)([._]|$)|multi_?token", re.IGNORECASE)
_ROPE_OF_LENGTH = ("dynamic", "longrope")
_DROPOUT = re.compile("(^|_)(dropout|dropout_p|pdrop|layerdrop)($|_prob$)")


def check_model(model: PreTrainedModel) -> None:
    """Checks that a model gives the tokens of a tree what it gives those of its rows.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers.

    Raises
    ------
    UnsupportedModelError
        Naming the first of these that the model has:

        - an attention that is not ``"trajkit"``: flash attention cannot express the
          mask, and others would derive one from the positions;
        - layers other than full and sliding attention (linear attention, Mamba, short
          convolutions, sparse attention): their state runs on through other branches.
          `carry_states` makes those of Qwen3-Next follow the tree;
        - heads that predict several tokens ahead, along the layout of the pack;
        - RoPE whose frequencies depend on the longest position of the batch;
        - dropout in training mode.

    Notes
    -----
    Auxiliary losses of a mixture of experts count each token of the pack once, where
    rows count a shared token in every row. They are no part of the logprobs; leave
    ``output_router_logits`` off, or accept another weighting.
    """
    name = type(model).__name__
    linear = any(carries_states(module) for module in model.modules())
    allowed = {"full_attention", "sliding_attention"}
    if linear:
        allowed.add("linear_attention")
    for config in _configs(model.config):
        _check_config(name, config, allowed)
    if not (model._supports_attention_backend or linear):
        raise UnsupportedModelError(
            f"{name} does not hand keyword arguments to its attention layers "
            "(_supports_attention_backend is false): the tree would not reach them"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} has an encoder: packs are for decoders")
    for path, module in uncarried(model):
        kind = type(module).__name__
        if _RECURRENT.search(kind) or isinstance(module, torch.nn.Conv1d):
            raise UnsupportedModelError(
                f"{name}: {path} ({kind}) mixes tokens along the pack and not along a "
                "row, so branches would leak into each other: train on padded or "
                "varlen rows"
            )
        if _MULTI_TOKEN.search(path) or _MULTI_TOKEN.search(kind):
            raise UnsupportedModelError(
                f"{name}: {path} ({kind}) predicts several tokens ahead, which are not "
                "the next tokens of a pack: remove these layers or train on rows"
            )


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration and that of the text model in a model of several parts."""
    yield config
    text = config.get_text_config(decoder=True)
    if text is not config:
        yield text


def _check_config(name: str, config: PreTrainedConfig, allowed: set[str]) -> None:
    used = config._attn_implementation
    if used != ATTENTION:
        raise UnsupportedModelError(
            f"{name} runs attention {used!r}, which does not read the tree of a pack: "
            f"call model.set_attn_implementation({ATTENTION!r})"
        )
    types = {*(getattr(config, "layer_types", None) or ())}
    if types - allowed:
        raise UnsupportedModelError(
            f"{name} has layers of {sorted(types - allowed)}, which mix tokens along the "
            "pack and not along a row, so branches would leak into each other: train on "
            "padded or varlen rows, or for Qwen3-Next call trajkit.torch.carry_states"
        )
    for kind in _rope_types(config):
        if kind in _ROPE_OF_LENGTH:
            raise UnsupportedModelError(
                f"{name} uses {kind} RoPE, whose frequencies depend on the longest "
                "position of a batch and so on what a pack holds: configure a fixed "
                "factor (yarn, linear)"
            )


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """The kinds of RoPE, of all layer types."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    for parameters in nested or [given]:
        yield parameters.get("rope_type", "default")


def _check_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    for key, value in config.to_dict().items():
        if _DROPOUT.search(key) and isinstance(value, float) and value > 0:
            raise UnsupportedModelError(
                f"{type(model).__name__} has {key}={value} in training mode: rows that "
                "share a token would share what it drops. Set it to 0"
            )


def model_inputs(
    model: PreTrainedModel,
    pack: Pack,
    *,
    kernel: Kernel = "masked",
    kernel_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments with which a model runs on a pack.

    Parameters
    ----------
    model : PreTrainedModel
        Loaded with ``attn_implementation="trajkit"``. `check_model` looks at it.
    pack : Pack
        Its masks are built on the CPU, so pass the pack as the dataset gives it.
    kernel, kernel_options
        As for `TreeAttention`.

    Returns
    -------
    dict
        ``input_ids`` and ``position_ids`` of shape (1, n_tokens) on the model's device,
        ``tree`` and ``use_cache=False``.

    Raises
    ------
    UnsupportedModelError
        As for `check_model`.
    LayoutError
        A tree of the pack continues in another pack.
    """
    return _inputs(model, pack, None, _Options(kernel, kernel_options))


def _inputs(
    model: PreTrainedModel,
    pack: Pack,
    carried: CarriedStates | None,
    options: "_Options",
) -> dict[str, Any]:
    check_model(model)
    if model.training:
        _check_dropout(model)
    device = model.get_input_embeddings().weight.device
    return {
        "input_ids": pack.input_ids[None].to(device),
        "position_ids": pack.position_ids[None].to(device),
        "tree": TreeAttention(
            pack, device, options.kernel, options.kernel_options, carried
        ),
        "use_cache": False,
    }


def edge_logprobs(
    model: PreTrainedModel,
    pack: Pack,
    *,
    temperature: float = 1.0,
    chunk_size: int = 2048,
    kernel: Kernel = "masked",
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """The logprob that a model gives the target of each edge of a pack.

    Parameters
    ----------
    model, pack, kernel, kernel_options
        As for `model_inputs`.
    temperature, chunk_size
        As for `gather_logprobs`.

    Returns
    -------
    float tensor, shape (n_edges,)

    Raises
    ------
    UnsupportedModelError
        As for `check_model`; or the model changes its logits after the output
        projection (soft caps, scales), which `gather_logprobs` must then be given.
    LayoutError
        A tree of the pack continues in another pack: see `carry_backward`.
    """
    options = _Options(kernel, kernel_options, temperature, chunk_size)
    return _logprobs(model, pack, None, options)


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `edge_logprobs` and of those who call it for several packs."""

    kernel: Kernel
    kernel_options: dict[str, Any] | None
    temperature: float = 1.0
    chunk_size: int = 2048


def _hidden(
    model: PreTrainedModel,
    pack: Pack,
    carried: CarriedStates | None,
    options: _Options,
) -> Tensor:
    """The last hidden states of a pack."""
    inputs = _inputs(model, pack, carried, options)
    hidden: Tensor = model.base_model(**inputs).last_hidden_state
    return hidden


def _logprobs(
    model: PreTrainedModel,
    pack: Pack,
    carried: CarriedStates | None,
    options: _Options,
) -> Tensor:
    """As `edge_logprobs`."""
    head = _output_head(model)
    hidden = _hidden(model, pack, carried, options)
    return gather_logprobs(
        hidden,
        head,
        pack,
        temperature=options.temperature,
        chunk_size=options.chunk_size,
    )


def carry_logprobs(
    model: PreTrainedModel,
    parts: Sequence[Pack],
    *,
    temperature: float = 1.0,
    chunk_size: int = 2048,
    kernel: Kernel = "masked",
    kernel_options: dict[str, Any] | None = None,
) -> list[Tensor]:
    """As `edge_logprobs`, without gradients, for the packs of a tree in several packs.

    Each pack runs once. Keys and values of the tokens that the next pack attends are
    kept in between.

    Parameters
    ----------
    model, temperature, chunk_size, kernel, kernel_options
        As for `edge_logprobs`.
    parts : sequence of Pack
        The packs of one list of `PackDataset.parts`, in order.

    Returns
    -------
    list of float tensor, each of shape (n_edges,)

    Raises
    ------
    UnsupportedModelError
        As for `edge_logprobs`; or the model has linear attention, whose state would have
        to be carried as well; or it runs a layer twice.
    LayoutError
        The packs are not all parts of one tree, in order.
    """
    _check_parts(model, parts)
    options = _Options(kernel, kernel_options, temperature, chunk_size)
    found = []
    states: States = {}
    with torch.no_grad():
        for pack in parts:
            carried = CarriedStates(pack, states)
            found.append(_logprobs(model, pack, carried, options))
            states = carried.handed
    return found


def carry_backward(
    model: PreTrainedModel,
    parts: Sequence[Pack],
    loss: Callable[[Tensor, Pack], Tensor],
    *,
    temperature: float = 1.0,
    chunk_size: int = 2048,
    kernel: Kernel = "masked",
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """Forward and backward of a tree in several packs, with one pack in memory at a time.

    The packs run forward without gradients, and keys and values of the tokens that the
    next pack attends are kept. Then, from the last pack to the first, each runs again
    with gradients, and the gradients of its prefix are added to those of the pack that
    computed it. So every pack but the last runs forward twice. A pack with complete
    trees runs once.

    Parameters
    ----------
    model, temperature, chunk_size, kernel, kernel_options
        As for `edge_logprobs`. Gradients are added to ``grad`` of its parameters.
    parts : sequence of Pack
        The packs of one list of `PackDataset.parts`, in order.
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
    _check_parts(model, parts)
    options = _Options(kernel, kernel_options, temperature, chunk_size)
    prefixes: list[States] = [{}]
    with torch.no_grad():
        for pack in parts[:-1]:
            carried = CarriedStates(pack, prefixes[-1])
            _hidden(model, pack, carried, options)
            prefixes.append(carried.handed)
    values = []
    gradients: States = {}
    for pack in reversed(parts):
        carried = CarriedStates(pack, prefixes.pop(), gradients)
        value = loss(_logprobs(model, pack, carried, options), pack)
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
    if len(parts) > 1 and any(carries_states(module) for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has linear attention, whose state is not carried from "
            "pack to pack: pack with oversize='repeat'"
        )


def _output_head(model: PreTrainedModel) -> torch.nn.Module:
    config = model.config.get_text_config(decoder=True)
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{type(model).__name__} applies {key} to its logits: call "
                "gather_logprobs with a function that does so too"
            )
    # transformers does not annotate it
    head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head
