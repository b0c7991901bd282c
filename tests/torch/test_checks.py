"""Models that give a tree other logprobs than its rows are refused, with what to do."""

import contextlib
import copy
import functools

import pytest
import torch
import transformers

from tests.torch.cases import pack_of
from tests.torch.tiny_models import make
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch import models
from trajkit.torch.attention import TreeAttention, tree_attention
from trajkit.torch.models import check_model, edge_logprobs, model_inputs

Llama = transformers.models.llama.modeling_llama


@pytest.fixture(autouse=True)
def nothing_tried():
    """As in a new process."""
    models._CHECKED.clear()


@pytest.fixture
def trials(monkeypatch):
    """How often a model was tried."""
    seen = []
    trial = models._trial
    monkeypatch.setattr(models, "_trial", lambda m: seen.append(m) or trial(m))
    return seen


@pytest.mark.parametrize("window", [5, 40, 100])
def test_the_trial_is_longer_than_the_longest_window(window):
    model = make("mistral", sliding_window=3)
    model.model.layers[1].self_attn.local_window = window
    pack, rows, part = models._trial(model)
    lengths = [len(row) for row in rows]
    assert min(lengths[:2]) > max(24, window + 4)
    assert len(rows) == 15
    # as many first and second tokens of siblings as there are siblings
    assert torch.bincount(part).tolist() == [lengths[0] - 8 + 12, 7, 5, 9, 12, 12]
    edges = set()
    for source, row, at, target in zip(
        pack.edge_source.tolist(),
        pack.edge_row.tolist(),
        pack.edge_position.tolist(),
        pack.edge_target.tolist(),
        strict=True,
    ):
        assert pack.position_ids[source] == at - 1
        assert rows[row][at] == target
        edges.add((row, at))
    assert {(0, k) for k in range(1, lengths[0])} <= edges


def around(module, forward):
    """Give a module another forward, which gets the plain one first."""
    plain = module.forward
    module.forward = lambda *args, **kwargs: forward(plain, *args, **kwargs)


def scaled(name, dtype, scale):
    """A model with weights of this size, and norms that do something."""
    model = make(name, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale / 0.3)
            else:
                parameter.add_(torch.rand_like(parameter) * 0.3)
    return model.to(dtype)


# Each makes a model whose layers do something that only the trial can find.


def mask_is_causal(model):
    def forward(plain, hidden_states, *, tree=None, **kwargs):
        if tree is not None:
            tree = copy.copy(tree)
            tree.tokens = tree.keys = tree.tokens.copy()
            tree.tokens[1] = tree.tokens.shape[1]
            tree._masks = {}
        return plain(hidden_states, tree=tree, **kwargs)

    for layer in model.model.layers:
        around(layer.self_attn, forward)


def mlp_looks_back(model):
    around(model.model.layers[1].mlp, lambda plain, x: plain(x + 0.3 * x.roll(1, 1)))


def norm_over_the_pack(model):
    around(model.model.norm, lambda plain, x: plain(x - x.cumsum(1) / x.shape[1]))


def positions_are_ignored(model):
    def forward(plain, x, position_ids):
        return plain(x, torch.arange(x.shape[1])[None].expand_as(position_ids))

    around(model.model.rotary_emb, forward)


def window_in_the_layer(model):
    """In eager attention alone, as where it is written into a layer's own code."""

    def forward(plain, hidden_states, attention_mask=None, **kwargs):
        if isinstance(attention_mask, torch.Tensor):
            n = attention_mask.shape[-1]
            far = torch.ones(n, n, dtype=torch.bool).tril(-4)
            attention_mask = attention_mask.masked_fill(far, -1e9)
        return plain(hidden_states, attention_mask=attention_mask, **kwargs)

    for layer in model.model.layers:
        around(layer.self_attn, forward)


def head_looks_back(model):
    around(model.lm_head, lambda plain, x: plain(x + 0.3 * x.roll(1, -2)))


WRONG = [
    mask_is_causal,
    mlp_looks_back,
    norm_over_the_pack,
    positions_are_ignored,
    window_in_the_layer,
    head_looks_back,
]
VALUES = (
    r"LlamaForCausalLM \(.*LlamaAttention.*\) gives a tree other logprobs than its rows: "
    r"-\d.* in the tree and -\d.* in the row"
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 0.3])
@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_model_is_refused_at_its_first_pack(change, scale, dtype):
    model = scaled("llama", dtype, scale)
    change(model)
    with pytest.raises(UnsupportedModelError, match=VALUES):
        edge_logprobs(model, pack_of())
    # and again
    with pytest.raises(UnsupportedModelError, match=VALUES):
        model_inputs(model, pack_of())
    assert edge_logprobs(model, pack_of(), check="never").requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe", "Granite hybrid"])
@pytest.mark.parametrize("scale", [0.02, 0.3, 0.6])
def test_rounding_is_no_fault(name, dtype, scale):
    check_model(scaled(name, dtype, scale))


def test_one_model_of_a_kind_is_tried(trials):
    pack, model = pack_of(), make("llama")
    for _ in range(3):
        edge_logprobs(model, pack)
    assert len(trials) == 1
    edge_logprobs(model, pack, check="always")
    edge_logprobs(make("qwen3"), pack)
    assert len(trials) == 3
    edge_logprobs(make("qwen3_moe"), pack, check="never")
    assert len(trials) == 3
    with pytest.raises(
        ValueError, match=r"check='sometimes'.*'always', 'once', 'never'"
    ):
        check_model(model, check="sometimes")


def bound_argument(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = functools.partial(type(mlp).forward, None)


CHANGES = {
    "a layer's forward": lambda model: setattr(
        model.model.layers[0].mlp, "forward", lambda x: x
    ),
    "a bound argument": bound_argument,
    "a setting of a layer": lambda model: setattr(
        model.model.layers[0].self_attn, "scaling", 0.5
    ),
    "another layer": lambda model: model.model.layers.append(torch.nn.Identity()),
    "a hook": lambda model: model.model.norm.register_forward_hook(
        lambda module, args, output: output
    ),
    "the configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    "the mode": lambda model: model.eval(),
    "the dtype": lambda model: model.float(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_model_is_tried_again(what, trials):
    model = make("llama")
    check_model(model)
    CHANGES[what](model)
    with contextlib.suppress(UnsupportedModelError):
        check_model(model)
    assert len(trials) == 2


def test_the_trial_leaves_no_trace():
    model = make("llama")
    model.model.layers[0].eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.register_buffer("counter", torch.zeros(1))
    model.model.register_forward_hook(lambda *a: model.counter.add_(1) and None)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check_model(model, check="always")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert all(p.grad is None for p in model.model.parameters())
    assert model.counter == 0
    assert model.config._attn_implementation == "trajkit"
    assert torch.is_grad_enabled()


def test_a_model_without_weights_is_tried_when_it_has_some(trials):
    with torch.device("meta"):
        model = make("llama")
    check_model(model)
    assert not trials
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    with pytest.raises(UnsupportedModelError, match=r"not finite .*load its weights"):
        check_model(model)


def test_equal_weights_prove_nothing(trials):
    model = make("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    check_model(model)
    check_model(model)
    assert len(trials) == 2


def test_checkpointed_and_compiled_models_are_tried():
    model = make("llama")
    model.activation_checkpointing_enable()
    pack = pack_of()
    plain = edge_logprobs(make("llama"), pack, check="never")
    for given in (model, torch.compile(model)):
        torch.testing.assert_close(edge_logprobs(given, pack, check="always"), plain)
    wrong = make("llama")
    mlp_looks_back(wrong)
    with pytest.raises(UnsupportedModelError, match=VALUES):
        edge_logprobs(torch.compile(wrong), pack)


def dropped_in_code(model):
    mlp, dropout = model.model.layers[0].mlp, torch.nn.functional.dropout
    around(mlp, lambda plain, x: dropout(plain(x), 0.1, mlp.training))


def dropout_attribute(model):
    model.model.layers[0].mlp.resid_pdrop = 0.1


def dropout_module(model):
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Dropout(0.5))


def noise_attribute(model):
    model.model.embed_tokens.neftune_noise_alpha = 5.0


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (dropped_in_code, "draws random numbers in training mode"),
        (dropout_attribute, r"model.layers.0.mlp \(LlamaMLP\) has resid_pdrop=0.1"),
        (dropout_module, r"layers.0.mlp.down_proj.1 \(Dropout\) has p=0.5 in training"),
        (noise_attribute, r"embed_tokens \(Embedding\) has neftune_noise_alpha=5.0"),
    ],
)
def test_what_is_random_is_refused_in_training_mode(change, pattern):
    model = make("llama")
    change(model)
    with pytest.raises(UnsupportedModelError, match=pattern):
        edge_logprobs(model, pack_of())
    edge_logprobs(model.eval(), pack_of())


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.nn.Sequential])
def test_wrappers_are_refused_with_the_cure(wrap):
    with pytest.raises(
        UnsupportedModelError, match=r"trajkit.torch.PackedModel\(model\)"
    ):
        edge_logprobs(wrap(make("llama")), pack_of())


def only_rows(model):
    def forward(plain, x):
        if x.shape[1] >= 45:
            raise RuntimeError("no packs, please")
        return plain(x)

    around(model.model.layers[0].mlp, forward)


def own_mask(model):
    def forward(plain, hidden_states, attention_mask=None, **kwargs):
        return plain(hidden_states, attention_mask=torch.zeros(1, 1, 2, 2), **kwargs)

    around(model.model.layers[0].self_attn, forward)


def config_sees_what_follows(model):
    model.config.is_causal = False


def layer_sees_what_follows(model):
    model.model.layers[0].self_attn.is_causal = False


def hands_down_nothing(model):
    model._supports_attention_backend = False


def attention(name):
    return lambda model: setattr(model.config, "_attn_implementation", name)


def mixer(kind):
    layer = type(kind, (torch.nn.Identity,), {})
    return lambda model: setattr(model.model.layers[1], "mixer", layer())


def head(name):
    return lambda model: model.model.add_module(name, torch.nn.Linear(2, 2))


CANNOT = r"cannot run on a pack: "
REFUSED = [
    (only_rows, rf"LlamaAttention\) {CANNOT}RuntimeError: no packs"),
    (own_mask, rf"{CANNOT}LayoutError: .* attention mask \(Tensor\) and a tree"),
    (config_sees_what_follows, "attend those after them"),
    (layer_sees_what_follows, "LlamaAttention attends in both directions"),
    (hands_down_nothing, "does not hand keyword arguments to its attention layers"),
    *(
        (attention(name), rf"runs attention {name!r}, .* model.set_attn_implementation")
        for name in ("flash_attention_2", "flash_attention_3", "sdpa", "eager", None)
    ),
    *(
        (mixer(kind), rf"layers.1.mixer \({kind}\) mixes tokens along the pack")
        for kind in ("Mamba2Mixer", "GatedDeltaNet", "SSM", "RgLru")
    ),
    *(
        (head(name), rf"model.{name} \(Linear\) predicts several tokens ahead")
        for name in ("mtp", "nextn", "mtp_layers")
    ),
]


@pytest.mark.parametrize(("change", "pattern"), REFUSED)
def test_models_that_cannot_follow_a_tree_are_refused(change, pattern):
    model = make("llama")
    change(model)
    for use in (check_model, lambda model: model_inputs(model, pack_of())):
        with pytest.raises(UnsupportedModelError, match=pattern):
            use(model)


def test_a_model_without_a_tree_is_refused():
    pack, model = pack_of(), make("llama")
    with pytest.raises(LayoutError, match="LlamaAttention got no tree: call the model"):
        model(input_ids=pack.input_ids[None], position_ids=pack.position_ids[None])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("nested", [False, True])
def test_rope_of_the_longest_position_is_refused_where_it_changes(kind, nested):
    model, pack = make("llama"), pack_of()
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    n = int(pack.position_ids.max()) + 1
    rope["original_max_position_embeddings"] = n
    model.config.rope_parameters = {"full_attention": rope} if nested else rope
    assert model_inputs(model, pack)["use_cache"] is False
    rope["original_max_position_embeddings"] = n - 1
    pattern = rf"up to {n - 1} tokens, and the longest row has {n}: {kind} RoPE"
    with pytest.raises(UnsupportedModelError, match=pattern):
        model_inputs(model, pack)


def test_places_in_a_pack_are_refused_where_llama_4_scales_by_them():
    pack = pack_of("several_sessions")
    n = len(pack.input_ids)
    pattern = f"up to {n - 1} tokens, and the pack has {n}: attn_temperature_tuning"
    for floor, due in ((n + 1, contextlib.nullcontext()), (n, refused(pattern))):
        model = make("Llama 4, chunks", floor_scale=floor)
        check_model(model)
        with due:
            model_inputs(model, pack)


def refused(pattern):
    return pytest.raises(UnsupportedModelError, match=pattern)


def attend(pack, kernel="masked", batch=1, n=None, mask=None, **options):
    x = torch.zeros(batch, 2, n or len(pack.input_ids), 8)
    tree = TreeAttention(pack, "cpu", kernel)
    return tree_attention(torch.nn.Identity(), x, x, x, mask, tree=tree, **options)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"dropout": 0.1}, "drops attention weights with probability 0.1"),
        ({"position_bias": 1}, "adds a bias that depends on places in the pack"),
        ({"block_indices": 1}, "attends chosen blocks of the pack"),
        ({"n": 3}, r"for a pack of \d+ tokens"),
        ({"batch": 2}, "pass one pack a call"),
        ({"mask": torch.zeros(1)}, r"an attention mask \(Tensor\) and a tree"),
    ],
)
@pytest.mark.parametrize("kernel", ["masked", "trunk"])
def test_what_attention_cannot_do_is_refused(options, pattern, kernel):
    with pytest.raises((UnsupportedModelError, LayoutError), match=pattern):
        attend(pack_of(), kernel, **options)
