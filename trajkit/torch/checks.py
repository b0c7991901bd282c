"""Which models train correctly on tree packs: what is known of them, and a trial."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel

from trajkit._arguments import check_choice
from trajkit.errors import UnsupportedModelError
from trajkit.torch.attention import ATTENTION
from trajkit.torch.datasets import Pack, PackDataset
from trajkit.torch.states import follow_trees, follows, not_following

Check: TypeAlias = Literal["always", "once", "never"]

# Layers that carry a state, or gather neighbours, along the layout of the pack.
_RECURRENT = re.compile(
    "MambaMixer|Mamba2Mixer|SSM|DeltaNet|LightningAttention|RecurrentBlock|RgLru|Rwkv"
    "|Retention|ShortConv"
)
_MULTI_TOKEN = re.compile(r"(^|[._])(mtp|nextn)([._]|$)|multi_?token", re.IGNORECASE)
_ROPE_OF_LENGTH = ("dynamic", "longrope")
_RANDOM = re.compile(
    r"(^|_)(dropout|dropout_p|p?drop|drop_(prob|path|rate)|layerdrop)($|_)"
    "|jitter|noise_?(alpha|std|scale)?$"
)
_OF_OTHER_HEADS = re.compile("^(classifier|summary|cls)_")
_WINDOW = re.compile("window|chunk_size|compress|block_size")
_LONGEST_WINDOW = 8192
"""Of windows that the trial reaches beyond."""

# The largest difference of a logprob that is no fault, per unit of the logits' size.
_BOUNDS = {torch.float16: 0.02, torch.bfloat16: 0.1}
_BOUND = 1e-4
_PRECISIONS = (torch.float64, torch.float32, *_BOUNDS)
_PLAIN = (bool, int, float, str, torch.dtype, types.NoneType)
_CHECKED: WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""Of models that passed the trial, by options, what they were then."""


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model in what torch.compile and PEFT make of it.

    Raises
    ------
    UnsupportedModelError
        It is in a wrapper that must run itself, or is no model of transformers.
    """
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel | DataParallel) or (
        name == "FullyShardedDataParallel"
    ):
        raise UnsupportedModelError(
            f"{name} averages gradients only if its own forward runs: give it "
            "trajkit.torch.PackedModel(model) to wrap, and call the result with a pack"
        )
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return unwrapped(model._orig_mod)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        for adapter, config in model.peft_config.items():
            if config.is_prompt_learning or getattr(
                config, "alora_invocation_tokens", None
            ):
                raise UnsupportedModelError(
                    f"{name}: adapter {adapter!r} ({type(config).__name__}) depends on "
                    "where a row begins, which a pack does not say: use one that changes "
                    "weights, such as LoRA"
                )
        return unwrapped(model.get_base_model())
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{name} is no model of transformers: pass a causal language model, or call "
            "trajkit.torch.PackedModel(model) through its wrapper"
        )
    return model


def check_known(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model, after a look for what is known to be wrong on trees."""
    causal = unwrapped(model)
    name = type(causal).__name__
    follow_trees(causal)
    linear = any(follows(module) for module in causal.modules())
    for config in _configs(causal.config):
        used = config._attn_implementation
        if used != ATTENTION:
            raise UnsupportedModelError(
                f"{name} runs attention {used!r}, which does not read the tree of a pack: "
                f"call model.set_attn_implementation({ATTENTION!r})"
            )
    if not (causal._supports_attention_backend or linear):
        raise UnsupportedModelError(
            f"{name} does not hand keyword arguments to its attention layers "
            "(_supports_attention_backend is false): the tree would not reach them"
        )
    if causal.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} has an encoder: packs are for decoders")
    if layers_of(causal) is causal:
        raise UnsupportedModelError(
            f"{name} has no output projection apart from its layers: load it as a causal "
            "language model"
        )
    # not those that read images and sounds
    decoder = {*causal.get_decoder().modules()}  # type: ignore[no-untyped-call]
    for path, module in not_following(causal):
        kind = type(module).__name__
        mixes = _RECURRENT.search(kind) or isinstance(module, torch.nn.Conv1d)
        if mixes and module in decoder:
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
    _check_random(causal)
    return causal


def layers_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a causal model before its output projection."""
    base: torch.nn.Module = model.base_model
    if base is model:
        base = model.get_decoder()
    return getattr(model, "model", base) if base is model else base


def chooses_tokens(model: PreTrainedModel) -> bool:
    """Whether layers attend tokens that an indexer chooses (sparse attention)."""
    return any("Indexer" in type(module).__name__ for module in model.modules())


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration and that of the text model in a model of several parts."""
    yield config
    text = config.get_text_config(decoder=True)
    if text is not config:
        yield text


def check_lengths(model: PreTrainedModel, n: int) -> None:
    """Raise if frequencies of RoPE depend on the longest of rows of up to n tokens."""
    for kind, short in _rope_of_length(model):
        if n > short:
            raise UnsupportedModelError(
                f"{type(model).__name__} uses {kind} RoPE, whose frequencies depend on the "
                "longest position of a batch and so on what a pack holds, from "
                f"{short} tokens on, and the pack has rows of {n}: configure a fixed "
                "factor (yarn, linear), or cut the rows"
            )


def _rope_of_length(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """The kinds of RoPE that change with the length, and from which length on."""
    for config in _configs(model.config):
        limit = getattr(config, "original_max_position_embeddings", None)
        given = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in given.values() if isinstance(value, dict)]
        for parameters in nested or [given]:
            kind = parameters.get("rope_type", "default")
            short = parameters.get("original_max_position_embeddings") or limit
            if kind in _ROPE_OF_LENGTH:
                yield kind, short or config.max_position_embeddings


def _check_random(model: PreTrainedModel) -> None:
    for path, module in model.named_modules():
        if not module.training:
            continue
        kind = type(module).__name__
        found = {
            key: value
            for key, value in vars(module).items()
            if _RANDOM.search(key) or (key == "p" and "Drop" in kind)
        }
        if isinstance(module, _DropoutNd):
            found["p"] = module.p
        for key, value in found.items():
            if isinstance(value, float) and value > 0:
                _refuse_random(model, f"{path} ({kind})", key, value)
    if model.training:
        config = model.config.get_text_config(decoder=True)
        for key, value in config.to_dict().items():
            plain = isinstance(value, float) and not _OF_OTHER_HEADS.search(key)
            if plain and value > 0 and _RANDOM.search(key):
                _refuse_random(model, "its configuration", key, value)


def _refuse_random(model: PreTrainedModel, where: str, key: str, value: float) -> None:
    raise UnsupportedModelError(
        f"{type(model).__name__}: {where} has {key}={value} in training mode: rows that "
        "share a token would share what is drawn for it. Set it to 0"
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A tree of three branches, its rows, and which edges are of which branch."""

    pack: Pack
    rows: list[Tensor]
    branch: Tensor


def try_model(
    model: torch.nn.Module,
    check: Check,
    tree_logprobs: Callable[[PreTrainedModel, Pack, Any], Tensor],
    options: Any,
) -> None:
    """Compares a tree with its rows, unless the model passed and did not change."""
    check_choice("check", check, Check)
    causal = unwrapped(model)
    if check == "never" or any(p.is_meta for p in causal.parameters()):
        return
    kind, passed = _kind(model), _CHECKED.setdefault(causal, {})
    if check == "once" and passed.get(repr(options)) == kind:
        return
    trial = _trial(causal)
    with _undisturbed(causal):
        try:
            _check_repeats(causal, lambda: tree_logprobs(causal, trial.pack, options))
            for module in causal.modules():
                module.training = False
            found = tree_logprobs(causal, trial.pack, options)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(causal).__name__} ({_layer_kinds(causal)}) cannot run on a pack: "
                f"{type(error).__name__}: {error}"
            ) from error
        expected, size, dtype = _row_logprobs(model, causal, trial)
    if _compare(causal, trial, found, expected, size, dtype):
        passed[repr(options)] = kind


def _compare(
    model: PreTrainedModel,
    trial: _Trial,
    found: Tensor,
    expected: Tensor,
    size: float,
    dtype: torch.dtype,
) -> bool:
    """Raise if logprobs differ; whether they say something of the model."""
    name = type(model).__name__
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModelError(
            f"{name} gives logprobs that are not finite for a row of {len(trial.rows[0])} "
            "tokens: load its weights first"
        )
    found, expected = found.double().cpu(), expected.double().cpu()
    difference = (found - expected).abs().nan_to_num(torch.inf)
    kinds = {p.dtype for p in model.parameters() if p.dtype in _PRECISIONS}
    narrow = max(kinds | {dtype}, key=lambda kind: torch.finfo(kind).eps)
    bound = _BOUNDS.get(narrow, _BOUND) * size + 1e-5
    if narrow in _BOUNDS:
        # One token may go to another expert by rounding alone, not those of a branch.
        parts = [difference[trial.branch == k].mean() for k in range(4)]
    else:
        if torch.get_float32_matmul_precision() != "highest":
            bound *= 20
        parts = [difference[trial.branch == k].max() for k in range(4)]
    worst = max(range(4), key=lambda k: float(parts[k]))
    if float(parts[worst]) > bound:
        at = int(torch.where(trial.branch == worst, difference, -1.0).argmax())
        raise UnsupportedModelError(
            f"{name} ({_layer_kinds(model)}) gives a tree other logprobs than its rows: "
            f"{float(found[at]):.6g} in the tree and {float(expected[at]):.6g} in the "
            f"row for token {int(trial.pack.edge_position[at])} of row "
            f"{int(trial.pack.edge_row[at])} of a trial (largest difference for "
            f"{narrow}: {bound:.2g}). Its layers mix tokens in a way that trajkit does "
            "not know: train on rows"
        )
    return float(expected.std()) > 1e-6


def _layer_kinds(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    names = {
        type(module).__name__
        for module in model.modules()
        if re.search("Attention|Mixer|Conv1d", type(module).__name__)
    }
    return ", ".join(sorted(kinds | names)) or "layers of unknown kinds"


def _row_logprobs(
    model: torch.nn.Module, causal: PreTrainedModel, trial: _Trial
) -> tuple[Tensor, float, torch.dtype]:
    """The logprob of each edge in its row by the model itself; its logits' size, dtype."""
    longest = max(map(len, trial.rows))
    plain = causal._supports_sdpa and longest > 1024
    with _modes(causal, {ATTENTION: "sdpa" if plain else "eager"}):
        parts = []
        for row in trial.rows:
            ids = row[None].to(causal.get_input_embeddings().weight.device)
            parts.append(model(input_ids=ids, use_cache=False).logits[0])
    size = float(torch.cat(parts).double().square().mean().sqrt())
    wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    values = []
    pack = trial.pack
    for row, position, target in zip(
        pack.edge_row.tolist(),
        pack.edge_position.tolist(),
        pack.edge_target.tolist(),
        strict=True,
    ):
        values.append(wide[row][position - 1].log_softmax(0)[target])
    return torch.stack(values), size, parts[0].dtype


def _check_repeats(model: PreTrainedModel, run: Callable[[], Tensor]) -> None:
    if not any(module.training for module in model.modules()):
        return
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]

    before = state()
    one = run()
    if all(map(torch.equal, before, state())):
        return
    if not torch.equal(one, run()):
        raise UnsupportedModelError(
            f"{type(model).__name__} draws random numbers in training mode, which change "
            "its logprobs: rows that share a token would share what is drawn for it. "
            "Call model.eval(), or find the layer and set its probability to 0"
        )


@contextlib.contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Modes, buffers and random states as they were, afterwards."""
    training = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    places = {p.device for p in model.parameters() if p.device.type == "cuda"}
    kind = next(iter(places)).type if places else "cpu"
    with (
        torch.no_grad(),
        torch.random.fork_rng(sorted(place.index or 0 for place in places)),
        torch.autocast(kind, enabled=False),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            yield
        finally:
            for module, mode in training:
                module.training = mode
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def _modes(model: PreTrainedModel, attention: dict[str, str]) -> Iterator[None]:
    configs = {id(c): c for c in _all_configs(model)}.values()
    before = [(c, c._attn_implementation_internal) for c in configs]
    try:
        for config, used in before:
            config._attn_implementation_internal = attention.get(str(used), used)
        yield
    finally:
        for config, used in before:
            config._attn_implementation_internal = used


def _all_configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, PreTrainedConfig):
                yield from _configs(value)


def _trial(model: PreTrainedModel) -> _Trial:
    """A trunk beyond the longest window, with branches at its end and before it."""
    # packs that exist train without the compiled core
    from trajkit.packs.packing import pack as pack_rows
    from trajkit.rows.linearize import linearize
    from trajkit.turns.records import from_records

    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 1 << 20
    longest = min([longest, *(short for _, short in _rope_of_length(model))])
    window = max((w for w in _windows(model) if w <= _LONGEST_WINDOW), default=0)
    n = min(max(24, window + min(window, 64)), max(longest - 12, 4))
    vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    special = {
        v
        for k, v in config.to_dict().items()
        if k.endswith(("token_id", "_index")) and isinstance(v, int)
    }
    usable = torch.tensor([k for k in range(vocabulary) if k not in special])
    generator = torch.Generator().manual_seed(0)
    draw = usable[torch.randint(len(usable), (n + 21,), generator=generator)]
    trunk, *branches = draw.split([n, 7, 5, 9])
    leaves = (n, n, n - n // 3)
    rows = [torch.cat([trunk[:at], b]) for at, b in zip(leaves, branches, strict=True)]
    calls = [
        {"session_id": "trial", "prompt_ids": row[:at], "output_ids": row[at:]}
        for row, at in zip(rows, (1, *leaves[1:]), strict=True)
    ]
    tree = pack_rows(linearize(from_records(calls), "per_call"), n + 21)
    pack = PackDataset(tree)[0]
    of_trunk = (pack.edge_row == 0) & (pack.edge_position < n)
    return _Trial(pack, rows, torch.where(of_trunk, 0, pack.edge_row + 1))


def _windows(model: PreTrainedModel) -> Iterator[int]:
    """Numbers of tokens that a configuration or a module calls a window or a chunk."""
    places = [vars(module) for module in model.modules()]
    for config in _configs(model.config):
        places.append(config.to_dict())
    for place in places:
        for key, value in place.items():
            if _WINDOW.search(key):
                values = [value]
                if isinstance(value, dict):
                    values = [*value.values()]
                elif isinstance(value, list | tuple):
                    values = [*value]
                yield from (v for v in values if type(v) is int and v > 0)


def _kind(model: torch.nn.Module) -> Any:
    """Classes, hooks, settings and configuration of a model and of all modules in it."""
    modules = []
    for path, module in model.named_modules():
        own = vars(module)
        plain = tuple(x for x in own.items() if isinstance(x[1], _PLAIN))
        replaced = [(key, id(value)) for key, value in own.items() if callable(value)]
        hooks = [*module._forward_hooks, 0, *module._forward_pre_hooks]
        modules.append((path, type(module), plain, *replaced, *hooks))
    weights = frozenset((p.dtype, p.device.type) for p in model.parameters())
    return tuple(modules), weights, repr(unwrapped(model).config.to_dict())
