"""A pack as a model's inputs, its logprobs, and which models give the right ones."""

import contextlib
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from trajkit._arguments import check_choice
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch import attention as trees
from trajkit.torch.attention import ATTENTION, CarriedStates, Kernel, States, follows
from trajkit.torch.packs import Pack, PackDataset, gather_logprobs

Check: TypeAlias = Literal["always", "once", "never"]

# Layers that carry a state, or gather neighbours, along the layout of the pack.
_RECURRENT = re.compile(
    "MambaMixer|Mamba2Mixer|SSM|DeltaNet|LightningAttention|RecurrentBlock|RgLru|Rwkv"
    "|Retention|ShortConv"
)
_MULTI_TOKEN = re.compile(r"(^|[._ ])(mtp|nextn)([._ ]|$)|multi_?token", re.IGNORECASE)
_RANDOM = re.compile(
    r"(^|_)(dropout|dropout_p|p?drop|drop_(prob|path|rate)|layerdrop)($|_)"
    "|jitter|noise_?(alpha|std|scale)?$"
)
_WINDOW = re.compile("window|chunk_size|compress|block_size")
_LONGEST_WINDOW = 8192  # of those that the trial reaches beyond

# The largest difference of a logprob that is no fault, per unit of the logits' size.
_BOUNDS = {torch.float16: 0.02, torch.bfloat16: 0.1}
_PLAIN = (bool, int, float, str, torch.dtype, types.NoneType)
_CHECKED: WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""Of models that passed the trial, by options, what they were then."""


class Options(TypedDict, total=False):
    """How a model runs on packs: see `edge_logprobs`."""

    check: Check
    local: bool
    kernel: Kernel
    kernel_options: dict[str, Any] | None
    temperature: float
    chunk_size: int


def check_model(model: torch.nn.Module, *, check: Check = "once") -> None:
    """Checks that a model gives the tokens of a tree what it gives those of its rows.

    First it looks for what is known to be wrong. Then a small tree of several branches,
    longer than the windows of the model, runs as a pack and as rows through the model's
    own forward with its own attention, and the logprobs are compared. This trial changes
    no weight, gradient, flag or random state.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers with ``attn_implementation="trajkit"``, or
        one compiled or with adapters (PEFT).
    check : {"always", "once", "never"}
        When to make the trial. "once": unless the model passed it and has the layers,
        hooks and configuration of then. A model on the meta device is not tried.

    Raises
    ------
    UnsupportedModelError
        Naming the first of these that the model has: another attention; layers with a
        state that cannot start at a branch; heads that predict several tokens ahead;
        dropout or other random numbers in training mode; logprobs of a tree that are not
        those of its rows.
    """
    _ready(model, check=check, local=True)


def model_inputs(
    model: torch.nn.Module, pack: Pack, **options: Unpack[Options]
) -> dict[str, Any]:
    """Keyword arguments with which a model runs on a pack.

    Returns ``input_ids``, ``attention_mask`` (all true) and ``position_ids`` of shape
    (1, n_tokens) on the model's device, ``tree`` and ``use_cache=False``.

    Parameters
    ----------
    model, pack, **options
        As for `edge_logprobs`, and so is what is raised.
    """
    return _ready(model, **options).inputs(pack)


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
        ``check`` ("once") is that of `check_model`; ``kernel`` ("masked") and
        ``kernel_options`` (None) of `TreeAttention`; ``temperature`` (1.0) and
        ``chunk_size`` (2048) of `gather_logprobs`. With ``local`` (False) gradients stay
        on this rank, or the caller reduces them; without it a model that several ranks
        train must be in a wrapper: see `PackedModel`.

    Returns
    -------
    float tensor, shape (n_edges,)

    Raises
    ------
    UnsupportedModelError
        As for `check_model`; or RoPE has frequencies of the longest row, or Llama 4
        scales by the place in the pack, and the pack is long enough to change them.
    LayoutError
        A tree of the pack continues in another pack (see `carry_backward`); or several
        ranks run, and the model is not in a wrapper.
    """
    run = _ready(model, **options)
    found: Tensor = _inside(run.model, lambda: run.logprobs(pack))
    return found


def carry_logprobs(
    model: torch.nn.Module, parts: Sequence[Pack], **options: Unpack[Options]
) -> list[Tensor]:
    """As `edge_logprobs`, without gradients, for the packs of a tree in several packs.

    Each pack runs once. Keys and values of the tokens that the next pack attends are
    kept in between.

    Parameters
    ----------
    model, **options
        As for `edge_logprobs`. Layers with a state, layers that choose tokens and layers
        that run twice are refused: they are not carried.
    parts : sequence of Pack
        The packs of one list of `PackDataset.parts`, all and in order (LayoutError).
    """
    run = _ready(model, **options)
    _check_parts(run.model, parts)
    found = []
    states: States = {}
    with torch.no_grad():
        for pack in parts:
            carried = CarriedStates(pack, states)
            found.append(run.logprobs(pack, carried))
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
    computed it (as in Tree Training, arXiv:2511.00413, and DTA, arXiv:2602.00482).

    Parameters
    ----------
    model, parts, **options
        As for `carry_logprobs`. Gradients are added to ``grad`` of the parameters.
    loss : callable
        From the logprobs of a pack's edges and the pack to a scalar tensor.

    Returns
    -------
    scalar tensor
        The sum of the losses, without a gradient.
    """
    run = _ready(model, **options)
    _check_parts(run.model, parts)
    prefixes: list[States] = [{}]
    with torch.no_grad():
        for pack in parts[:-1]:
            carried = CarriedStates(pack, prefixes[-1])
            run.outputs(pack, carried)
            prefixes.append(carried.handed)
    values = []
    gradients: States = {}
    for pack in reversed(parts):
        carried = CarriedStates(pack, prefixes.pop(), gradients)
        value = loss(run.logprobs(pack, carried), pack)
        value.backward()
        values.append(value.detach())
        gradients = carried.prefix_gradients()
    return torch.stack(values).sum()


class PackedModel(torch.nn.Module):  # type: ignore[misc]
    """A module whose forward takes a pack and gives the logprobs of its edges.

    Wrappers for several devices work in their own forward and so must wrap a module that
    takes the pack: ``DistributedDataParallel(PackedModel(model))``, ``fully_shard`` of the
    layers and then of ``PackedModel(model)``, ``accelerator.prepare`` or a Trainer.
    Attributes that the module lacks are those of ``model``, such as ``config``. Options are
    those of `edge_logprobs`; with ``local``, several ranks may call the module without a
    wrapper that this class knows (`DistributedDataParallel`, FSDP2).
    """

    def __init__(self, model: torch.nn.Module, **options: Unpack[Options]) -> None:
        super().__init__()
        _unwrapped(model)
        self.model = model
        self.local = options.pop("local", False)
        self._options = options

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, pack: Pack) -> Tensor:
        """The logprob of each edge: `edge_logprobs` of the model."""
        wrapped = (
            isinstance(self, FSDPModule)
            or isinstance(_unwrapped(self.model), FSDPModule)
            or DistributedDataParallel._active_ddp_module is not None
        )
        if not (wrapped or self.local):
            _check_single_rank()
        # Masks are built on the host. Layers that are compiled themselves stay so.
        run = torch.compiler.disable(edge_logprobs)
        found: Tensor = run(self.model, pack, local=True, **self._options)
        return found


@dataclass(frozen=True, slots=True)
class _Run:
    """A checked model, and how it runs on packs."""

    model: PreTrainedModel
    kernel: Kernel = "masked"
    kernel_options: dict[str, Any] | None = None
    temperature: float = 1.0
    chunk_size: int = 2048
    is_trial: bool = False

    def inputs(
        self, pack: Pack, carried: CarriedStates | None = None
    ) -> dict[str, Any]:
        row = 1 + int(pack.position_ids.max())
        for limit, of_pack, why in _length_limits(self.model):
            n = max(row, len(pack.input_ids)) if of_pack else row
            if n > limit:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} is right up to {limit} tokens, and the "
                    f"{'pack' if of_pack else 'longest row'} has {n}: {why}"
                )
        embeddings = self.model.get_input_embeddings()
        device = embeddings.weight.device
        ids = pack.input_ids[None].to(device)
        unused = getattr(embeddings, "padding_idx", None)
        if unused is not None:
            # Its embedding is zero, where norms of some models have no gradient.
            alone = pack.subtree_end == torch.arange(1, 1 + len(pack.subtree_end))
            padding = (alone & (pack.position_ids == 0)).to(device) & (ids == unused)
            ids = torch.where(padding, (unused + 1) % len(embeddings.weight), ids)
        how = self.kernel, self.kernel_options
        return {
            "input_ids": ids,
            # without it, models guess packed rows from positions that go back
            "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "position_ids": pack.position_ids[None].to(device),
            "tree": trees.TreeAttention(pack, device, *how, carried),
            "use_cache": False,
        }

    def outputs(self, pack: Pack, carried: CarriedStates | None = None) -> Any:
        inputs = self.inputs(pack, carried)
        chooses = _chooses_tokens(self.model)
        with trees.running(inputs["tree"], tensors=chooses, trial=self.is_trial):
            return _layers_of(self.model)(**inputs)

    def logprobs(self, pack: Pack, carried: CarriedStates | None = None) -> Tensor:
        outputs = self.outputs(pack, carried)

        def head(states: Tensor) -> Tensor:
            # the model's forward after its layers, whatever it does there
            def layers(*args: Any, **kwargs: Any) -> Any:
                return type(outputs)(last_hidden_state=states[None])

            none = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
            # not the call of the model: its hooks run once, for the pack
            with _swapped([_layers_of(self.model)], "forward", layers):
                found = self.model.forward(input_ids=none, use_cache=False)
            logits: Tensor = found.logits[0]
            return logits

        return gather_logprobs(
            outputs.last_hidden_state,
            head,
            pack,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
        )


def _ready(
    model: torch.nn.Module, check: Check = "once", local: bool = False, **options: Any
) -> _Run:
    """How the transformers model in ``model`` runs, after all checks."""
    causal = _unwrapped(model)
    trees.follow_trees(causal)
    for fault in _known_faults(causal):
        raise UnsupportedModelError(f"{type(causal).__name__}{fault}")
    if not (local or isinstance(causal, FSDPModule)):
        _check_single_rank()
    run = _Run(causal, **options)
    tried = _Run(causal, run.kernel, run.kernel_options, is_trial=True)
    _inside(causal, lambda: _try(model, check, tried))
    return run


def _check_single_rank() -> None:
    """Raise if other ranks train the model, too."""
    dist = torch.distributed
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and (n := dist.get_world_size()) > 1:
        raise LayoutError(
            f"{n} ranks run, and nothing would average their gradients: wrap "
            "trajkit.torch.PackedModel(model) in DistributedDataParallel, fully_shard or "
            "a trainer and call that, or reduce them yourself and pass local=True"
        )


def _inside(model: PreTrainedModel, function: Callable[[], Any]) -> Any:
    """Calls a function as a forward of the model, so that FSDP2 gathers its weights."""
    if not isinstance(model, FSDPModule):
        return function()
    if "trajkit_forward" not in vars(model):
        model.trajkit_forward = lambda function: function()
        register_fsdp_forward_method(model, "trajkit_forward")
    return model.trajkit_forward(function)


def _unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model in what torch.compile and PEFT make of it."""
    name = type(model).__name__
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return _unwrapped(model._orig_mod)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        for adapter, config in model.peft_config.items():
            tokens = getattr(config, "alora_invocation_tokens", None)
            if tokens or config.is_prompt_learning:
                raise UnsupportedModelError(
                    f"{name}: adapter {adapter!r} ({type(config).__name__}) depends on "
                    "where a row begins: use one that changes weights, such as LoRA"
                )
        return _unwrapped(model.get_base_model())
    if isinstance(model, DistributedDataParallel | DataParallel) or (
        name == "FullyShardedDataParallel"
    ):
        raise UnsupportedModelError(
            f"{name} averages gradients only if its own forward runs: give it "
            "trajkit.torch.PackedModel(model) to wrap, and call it with a pack"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{name} is no model of transformers: pass a causal language model, or call "
            "trajkit.torch.PackedModel(model) through its wrapper"
        )
    return model


def _known_faults(model: PreTrainedModel) -> Iterator[str]:
    for config in _configs(model.config):
        if (used := config._attn_implementation) != ATTENTION:
            yield (
                f" runs attention {used!r}, which does not read the tree of a pack: call "
                f"model.set_attn_implementation({ATTENTION!r})"
            )
    linear = any(follows(module) for module in model.modules())
    if not (linear or model._supports_attention_backend):
        yield (
            " does not hand keyword arguments to its attention layers "
            "(_supports_attention_backend is false): the tree would not reach them"
        )
    if model.config.is_encoder_decoder:
        yield " has an encoder: packs are for decoders"
    if _layers_of(model) is model:
        yield " has no output projection apart from its layers: load a causal model"
    # not those that read images and sounds
    decoder = {*model.get_decoder().modules()}  # type: ignore[no-untyped-call]
    for path, module in trees.not_following(model):
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
    settings = [
        (f"{path} ({type(module).__name__})", vars(module))
        for path, module in model.named_modules()
        if module.training
    ]
    if model.training:
        named = model.config.get_text_config(decoder=True).to_dict()
        of_heads = ("classifier_", "summary_", "cls_")
        of_model = {k: x for k, x in named.items() if not k.startswith(of_heads)}
        settings.append(("its configuration", of_model))
    for where, given in settings:
        for key, value in given.items():
            random = _RANDOM.search(key) or (key == "p" and "Drop" in where)
            if random and isinstance(value, float) and value > 0:
                yield (
                    f": {where} has {key}={value} in training mode: rows that share a "
                    "token would share what is drawn for it. Set it to 0"
                )


def _layers_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a causal model before its output projection."""
    base: torch.nn.Module = model.base_model
    if base is model:
        base = model.get_decoder()
    return getattr(model, "model", base) if base is model else base


def _chooses_tokens(model: PreTrainedModel) -> bool:
    """Whether layers attend tokens that an indexer chooses (sparse attention)."""
    return any("Indexer" in type(module).__name__ for module in model.modules())


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configuration and that of the text model in a model of several parts."""
    text = config.get_text_config(decoder=True)
    return [config] if text is config else [config, text]


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of a model and of all modules in it."""
    values = (value for module in model.modules() for value in vars(module).values())
    found = (_configs(value) for value in values if isinstance(value, PreTrainedConfig))
    return [*{id(config): config for configs in found for config in configs}.values()]


def _length_limits(model: PreTrainedModel) -> Iterator[tuple[int, bool, str]]:
    """Lengths of a row, or of a pack (True), up to which a model is right, and why."""
    for config in _configs(model.config):
        if getattr(config, "attn_temperature_tuning", False):  # Llama 4
            why = "attn_temperature_tuning counts through the pack: make smaller ones"
            yield int(config.floor_scale) - 1, True, why
        limit = getattr(config, "original_max_position_embeddings", None)
        given = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in given.values() if isinstance(value, dict)]
        for parameters in nested or [given]:
            kind = parameters.get("rope_type")
            short = parameters.get("original_max_position_embeddings") or limit
            if kind in ("dynamic", "longrope"):
                why = f"{kind} RoPE depends on it: take yarn or linear, or cut the rows"
                yield short or config.max_position_embeddings, False, why


def _try(model: torch.nn.Module, check: Check, run: _Run) -> None:
    """Compares a tree with its rows, unless the model passed and did not change."""
    check_choice("check", check, Check)
    causal, options = run.model, repr((run.kernel, run.kernel_options))
    if check == "never" or any(p.is_meta for p in causal.parameters()):
        return
    kind, passed = _kind(model), _CHECKED.setdefault(causal, {})
    if check == "once" and passed.get(options) == kind:
        return
    pack, rows, part = _trial(causal)
    with _undisturbed(causal):
        try:
            _check_repeats(causal, lambda: run.logprobs(pack))
            with _swapped(causal.modules(), "training", False):
                found = run.logprobs(pack).double().cpu()
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(causal).__name__} ({_layer_kinds(causal)}) cannot run on a pack: "
                f"{type(error).__name__}: {error}"
            ) from error
        with _swapped(causal.modules(), "training", False):
            by_row, size, dtype = _row_logprobs(model, causal, rows)
    expected = by_row[pack.edge_row, pack.edge_position - 1]
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModelError(
            f"{type(causal).__name__} gives logprobs that are not finite for a row of "
            f"{len(rows[0])} tokens: load its weights first"
        )
    difference = (found - expected).abs().nan_to_num(torch.inf)
    bound = _BOUNDS.get(dtype, 1e-4) * size + 1e-5
    if dtype not in _BOUNDS and torch.get_float32_matmul_precision() != "highest":
        bound *= 20
    parts = [difference[part == k] for k in range(1 + int(part.max()))]
    values, bounds = [float(each.max()) for each in parts], [bound] * len(parts)
    if dtype in _BOUNDS:
        # Rounding sends some tokens to other experts, but not most of a part. Siblings are
        # many, and their rounding is that of the trunk, which has no branch.
        values = [float(each.median()) for each in parts]
        bounds[4:] = [min(bound, 4 * values[0] + bound / 10)] * len(parts[4:])
    for number, (value, most) in enumerate(zip(values, bounds, strict=True)):
        if value <= most:
            continue
        at = int(torch.where(part == number, difference, -1.0).argmax())
        raise UnsupportedModelError(
            f"{type(causal).__name__} ({_layer_kinds(causal)}) gives a tree other "
            f"logprobs than its rows: {found[at]:.6g} in the tree and {expected[at]:.6g} "
            f"in the row for token {pack.edge_position[at]} of row {pack.edge_row[at]} of "
            f"a trial (bound for {dtype}: {most:.2g}). Its layers mix tokens in an "
            "unknown way: train on rows"
        )
    if float(expected.std()) > 1e-6:  # or they say nothing of the model
        passed[options] = kind


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
    with _swapped(configs, "_attn_implementation_internal", attention):
        for _, same in itertools.groupby(rows, len):
            ids = torch.stack([*same]).to(causal.get_input_embeddings().weight.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            squares.append(float(logits.float().square().mean()))
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = wide.gather(2, ids[:, 1:, None].to(wide.device))[..., 0]
            logprobs += (chosen - wide.logsumexp(2)).double().cpu()
    known = {torch.float64, torch.float32, *_BOUNDS}
    dtypes = {p.dtype for p in causal.parameters()} & known | {logits.dtype}
    narrow = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    size = (sum(squares) / len(squares)) ** 0.5
    return pad_sequence(logprobs, batch_first=True), size, narrow


def _check_repeats(model: PreTrainedModel, run: Callable[[], Tensor]) -> None:
    if not any(module.training for module in model.modules()):
        return

    def random_states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _cuda(model))]

    before, first = random_states(), run()
    drew = not all(map(torch.equal, before, random_states()))
    if drew and not torch.equal(first, run()):
        raise UnsupportedModelError(
            f"{type(model).__name__} draws random numbers in training mode, which change "
            "its logprobs: rows that share a token would share what is drawn for it. "
            "Call model.eval(), or find the layer and set its probability to 0"
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
        warnings.catch_warnings(),
    ):
        # of FlexAttention, which is meant to be eager here
        warnings.filterwarnings("ignore", message="flex_attention called without")
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def _swapped(targets: Iterable[Any], name: str, value: Any) -> Iterator[None]:
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
    """A tree, its rows, and the part of the tree that each edge is in.

    A trunk (0) beyond the longest window, branches 1 and 2 at its end and 3 before it, and
    short siblings early in the trunk: 4 is what their first tokens predict, 5 the second.
    """
    # packs that exist train without the compiled core
    from trajkit.packs.packing import pack as pack_rows
    from trajkit.rows.linearize import linearize
    from trajkit.turns.records import from_records

    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 1 << 20
    sizes = [7, 5, 9, *[3] * 12]
    limits = [limit - sum(sizes) for limit, *_ in _length_limits(model)]
    window = max((w for w in _windows(model) if w <= _LONGEST_WINDOW), default=0)
    n = min(max(24, window + min(window, 64)), max(min([longest - 12, *limits]), 4))
    vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    named = config.to_dict().items()
    special = [v for k, v in named if k.endswith(("token_id", "_index"))]
    usable = torch.tensor([k for k in range(vocabulary) if k not in special])
    generator = torch.Generator().manual_seed(0)
    shape = (n + sum(sizes),)
    draw = usable[torch.randint(len(usable), shape, generator=generator)]
    trunk, *branches = draw.split([n, *sizes])
    leaves = (n, n, n - n // 3, *[min(n, 24) // 2] * 12)
    rows = [torch.cat([trunk[:at], b]) for at, b in zip(leaves, branches, strict=True)]
    calls = [
        {"session_id": "trial", "prompt_ids": row[:at], "output_ids": row[at:]}
        for row, at in zip(rows, (1, *leaves[1:]), strict=True)
    ]
    tree = pack_rows(linearize(from_records(calls), "per_call"), *shape)
    pack = PackDataset(tree)[0]
    row, after = pack.edge_row, pack.edge_position - leaves[-1]
    part = torch.where(row > 2, torch.where(after > 0, 3 + after, 0), row + 1)
    part[(row == 0) & (pack.edge_position < n)] = 0
    return pack, rows, part


def _windows(model: PreTrainedModel) -> Iterator[int]:
    """Numbers of tokens that a configuration or a module calls a window or a chunk."""
    places = [vars(module) for module in model.modules()]
    places += [config.to_dict() for config in _configs(model.config)]
    for place in places:
        for key, value in place.items():
            if _WINDOW.search(key):
                parts = value.values() if isinstance(value, dict) else value
                listed = parts if isinstance(value, dict | list | tuple) else [value]
                yield from (v for v in listed if type(v) is int and v > 0)


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
    return tuple(modules), weights, repr(_unwrapped(model).config.to_dict())


def _check_parts(model: PreTrainedModel, parts: Sequence[Pack]) -> None:
    none = torch.empty(0, dtype=torch.int64)
    handed = [none, *(pack.next_source for pack in parts)]
    taken = [*(pack.prefix_source for pack in parts), none]
    for k, (one, other) in enumerate(zip(handed, taken, strict=True)):
        if not torch.equal(one.cpu(), other.cpu()):
            raise LayoutError(
                f"part {k} of {len(parts)} attends {len(other)} tokens before it, and gets "
                f"{len(one)}: pass all packs of one list of PackDataset.parts(), in order"
            )
    carried = any(follows(module) for module in model.modules())
    if len(parts) > 1 and (carried or _chooses_tokens(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with a state, or that choose tokens, and "
            "these are not carried from pack to pack: pack with oversize='repeat'"
        )
