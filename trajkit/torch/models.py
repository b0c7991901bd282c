"""Which models train correctly on tree packs, and a pack as a model's inputs."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from trajkit.errors import UnsupportedModelError
from trajkit.torch.attention import ATTENTION, Kernel, TreeAttention
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
    """
    check_model(model)
    if model.training:
        _check_dropout(model)
    device = model.get_input_embeddings().weight.device
    return {
        "input_ids": pack.input_ids[None].to(device),
        "position_ids": pack.position_ids[None].to(device),
        "tree": TreeAttention(pack, device, kernel, kernel_options),
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
    """
    head = _output_head(model)
    inputs = model_inputs(model, pack, kernel=kernel, kernel_options=kernel_options)
    hidden = model.base_model(**inputs).last_hidden_state
    return gather_logprobs(
        hidden, head, pack, temperature=temperature, chunk_size=chunk_size
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
