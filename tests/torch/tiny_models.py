"""Random transformers models of a few thousand parameters, also in real float64."""

import contextlib

import torch
import transformers

from tests.torch.cases import VOCABULARY

# more threads only wait for each other
torch.set_num_threads(1)

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=7),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


def make(name, dtype=torch.float64, seed=0, **changes):
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="trajkit", experts_implementation="eager"
    )
    return model.to(dtype).train()


@contextlib.contextmanager
def float64_throughout():
    """No step of a float64 model is rounded to float32.

    Norms, routers and rotary embeddings of transformers compute in float32 whatever the
    dtype of the model.
    """
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept


def row_logprobs(model, rows, attention="sdpa"):
    """Of every token of every row given those before it; 0 for the first of a row."""
    model.set_attn_implementation(attention)
    parts = []
    for row in rows["input_ids"].to_pylist():
        ids = torch.tensor(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(1)[torch.arange(len(row) - 1), ids[1:]]
        parts += [chosen.new_zeros(1), chosen]
    model.set_attn_implementation("trajkit")
    return torch.cat(parts)


def gradients(model):
    """All gradients end to end, which are then cleared."""
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def relative(a, b):
    """The largest difference, as a share of the largest value."""
    return float((a - b).abs().max() / b.abs().max())
