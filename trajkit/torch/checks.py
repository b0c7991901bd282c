"""Which models train correctly on tree packs: what is known of them, and a trial."""

import contextlib
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
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
_MULTI_TOKEN = re.compile(r"(^|[._ ])(mtp|nextn)([._ ]|$)|multi_?token", re.IGNORECASE)
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
    if isinstance(model, DistributedDataParallel | DataParallel) or (
        name == "FullyShardedDataParallel"
    ):
        raise UnsupportedModelError(
            f"{name} averages gradients only if its own forward runs: give it "
            "trajkit.torch.PackedModel(model) to wrap, and call the result with a pack"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{name} is no model of transformers: pass a causal language model, or call "
            "trajkit.torch.PackedModel(model) through its wrapper"
        )
    return model


def check_known(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model, after a look for what is known to be wrong on trees."""
    causal = unwrapped(model)
    follow_trees(causal)
    for fault in _known_faults(causal):
        raise UnsupportedModelError(f"{type(causal).__name__}{fault}")
    return causal


def _known_faults(model: PreTrainedModel) -> Iterator[str]:
    for config in _configs(model.config):
        if (used := config._attn_implementation) != ATTENTION:
            yield (
                f" runs attention {used!r}, which does not read the tree of a pack: call "
                f"model.set_attn_implementation({ATTENTION!r})"
            )
    if not (
        model._supports_attention_backend or any(follows(m) for m in model.modules())
    ):
        yield (
            " does not hand keyword arguments to its attention layers "
            "(_supports_attention_backend is false): the tree would not reach them"
        )
    if model.config.is_encoder_decoder:
        yield " has an encoder: packs are for decoders"
    if layers_of(model) is model:
        yield (
            " has no output projection apart from its layers: load it as a causal "
            "language model"
        )
    # not those that read images and sounds
    decoder = {*model.get_decoder().modules()}  # type: ignore[no-untyped-call]
    for path, module in not_following(model):
        kind = type(module).__name__
        mixes = _RECURRENT.search(kind) or isinstance(module, torch.nn.Conv1d)
        if mixes and module in decoder:
            yield (
                f": {path} ({kind}) mixes tokens along the pack and not along a row, so "
                "branches would leak into each other: train on padded or varlen rows"
            )
        if _MULTI_TOKEN.search(f"{path} {kind}"):
            yield (
                f": {path} ({kind}) predicts several tokens ahead, which are not the "
                "next tokens of a pack: remove these layers or train on rows"
            )
    for where, key, value in _random_values(model):
        if isinstance(value, float) and value > 0:
            yield (
                f": {where} has {key}={value} in training mode: rows that share a token "
                "would share what is drawn for it. Set it to 0"
            )


def _random_values(model: PreTrainedModel) -> Iterator[tuple[str, str, Any]]:
    """What is named as a probability, of modules in training mode and of the model."""
    for path, module in model.named_modules():
        if module.training:
            kind = type(module).__name__
            if isinstance(module, _DropoutNd):
                yield f"{path} ({kind})", "p", module.p
            for key, value in vars(module).items():
                if _RANDOM.search(key) or (key == "p" and "Drop" in kind):
                    yield f"{path} ({kind})", key, value
    if model.training:
        config = model.config.get_text_config(decoder=True)
        for key, value in config.to_dict().items():
            if _RANDOM.search(key) and not _OF_OTHER_HEADS.search(key):
                yield "its configuration", key, value


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


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of a model and of all modules in it."""
    values = (value for module in model.modules() for value in vars(module).values())
    found = (_configs(value) for value in values if isinstance(value, PreTrainedConfig))
    return [*{id(config): config for configs in found for config in configs}.values()]


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


def try_model(
    model: torch.nn.Module, check: Check, options: Any, run: Callable[[Pack], Tensor]
) -> None:
    """Compares a tree with its rows, unless the model passed and did not change.

    ``run`` gives the logprobs of a pack, under these options.
    """
    check_choice("check", check, Check)
    causal = unwrapped(model)
    if check == "never" or any(p.is_meta for p in causal.parameters()):
        return
    kind, passed = _kind(model), _CHECKED.setdefault(causal, {})
    if check == "once" and passed.get(repr(options)) == kind:
        return
    pack, rows, branch = _trial(causal)
    with _undisturbed(causal):
        try:
            _check_repeats(causal, lambda: run(pack))
            with swapped(causal.modules(), "training", False):
                found = run(pack).double().cpu()
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(causal).__name__} ({_layer_kinds(causal)}) cannot run on a pack: "
                f"{type(error).__name__}: {error}"
            ) from error
        with swapped(causal.modules(), "training", False):
            by_row, size, dtype = _row_logprobs(model, causal, rows)
    expected = by_row[pack.edge_row, pack.edge_position - 1]
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModelError(
            f"{type(causal).__name__} gives logprobs that are not finite for a row of "
            f"{len(rows[0])} tokens: load its weights first"
        )
    difference = (found - expected).abs().nan_to_num(torch.inf)
    parts = [difference[branch == k] for k in range(4)]
    bound = _BOUNDS.get(dtype, _BOUND) * size + 1e-5
    if dtype in _BOUNDS:
        # One token may go to another expert by rounding alone, not those of a branch.
        values = [float(part.mean()) for part in parts]
    else:
        values = [float(part.max()) for part in parts]
        if torch.get_float32_matmul_precision() != "highest":
            bound *= 20
    if max(values) > bound:
        worst = branch == values.index(max(values))
        at = int(torch.where(worst, difference, -1.0).argmax())
        raise UnsupportedModelError(
            f"{type(causal).__name__} ({_layer_kinds(causal)}) gives a tree other "
            f"logprobs than its rows: {float(found[at]):.6g} in the tree and "
            f"{float(expected[at]):.6g} in the row for token "
            f"{int(pack.edge_position[at])} of row {int(pack.edge_row[at])} of a trial "
            f"(largest difference for {dtype}: {bound:.2g}). Its layers mix tokens in a "
            "way that trajkit does not know: train on rows"
        )
    if float(expected.std()) > 1e-6:  # or they say nothing of the model
        passed[repr(options)] = kind


def _layer_kinds(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    names = {type(module).__name__ for module in model.modules()}
    kinds |= {name for name in names if re.search("Attention|Mixer|Conv1d", name)}
    return ", ".join(sorted(kinds)) or "layers of unknown kinds"


def _row_logprobs(
    model: torch.nn.Module, causal: PreTrainedModel, rows: list[Tensor]
) -> tuple[Tensor, float, torch.dtype]:
    """Logprobs by row and place by the model itself; its logits' size; least precision."""
    plain = causal._supports_sdpa and max(map(len, rows)) > 1024
    configs = [c for c in configs_of(causal) if c._attn_implementation == ATTENTION]
    attention = "sdpa" if plain else "eager"
    logprobs, squares = [], []
    with swapped(configs, "_attn_implementation_internal", attention):
        for row in rows:
            ids = row.to(causal.get_input_embeddings().weight.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            squares.append(float(logits.float().square().mean()))
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = wide.gather(1, ids[1:, None].to(wide.device))[:, 0]
            logprobs.append((chosen - wide.logsumexp(1)).double().cpu())
    dtypes = {p.dtype for p in causal.parameters()} & {*_PRECISIONS} | {logits.dtype}
    narrow = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    size = (sum(squares) / len(squares)) ** 0.5
    return pad_sequence(logprobs, batch_first=True), size, narrow


def _check_repeats(model: PreTrainedModel, run: Callable[[], Tensor]) -> None:
    if not any(module.training for module in model.modules()):
        return

    def random_states() -> list[Tensor]:
        states = [torch.cuda.get_rng_state(device) for device in _cuda(model)]
        return [torch.get_rng_state(), *states]

    before, first = random_states(), run()
    if not all(map(torch.equal, before, random_states())):
        if not torch.equal(first, run()):
            raise UnsupportedModelError(
                f"{type(model).__name__} draws random numbers in training mode, which "
                "change its logprobs: rows that share a token would share what is drawn "
                "for it. Call model.eval(), or find the layer and set its probability to 0"
            )


def _cuda(model: PreTrainedModel) -> list[torch.device]:
    return [*{p.device for p in model.parameters() if p.is_cuda}]


@contextlib.contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Eager, without gradients; buffers and random states as they were, afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = _cuda(model)
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        torch.autocast("cuda" if devices else "cpu", enabled=False),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def swapped(targets: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute of objects, for a while."""
    before = [(x, name in vars(x), getattr(x, name)) for x in targets]
    try:
        for target, _, _ in before:
            setattr(target, name, value)
        yield
    finally:
        for target, own, old in before:
            setattr(target, name, old) if own else delattr(target, name)


def _trial(model: PreTrainedModel) -> tuple[Pack, list[Tensor], Tensor]:
    """A tree, its rows, and the branch of each edge.

    A trunk (branch 0) beyond the longest window, with two branches at its end and one
    before it (1 to 3).
    """
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
    on_trunk = (pack.edge_row == 0) & (pack.edge_position < n)
    return pack, rows, torch.where(on_trunk, 0, pack.edge_row + 1)


def _windows(model: PreTrainedModel) -> Iterator[int]:
    """Numbers of tokens that a configuration or a module calls a window or a chunk."""
    places = [vars(module) for module in model.modules()]
    places += [config.to_dict() for config in _configs(model.config)]
    for place in places:
        for key, value in place.items():
            if _WINDOW.search(key):
                values = value.values() if isinstance(value, dict) else value
                if not isinstance(value, dict | list | tuple):
                    values = [value]
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
