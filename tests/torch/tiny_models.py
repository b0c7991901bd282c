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
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "shared_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
STATES = {"n_groups": 1, "chunk_size": 8}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# with many heads no two tokens are worth exactly nothing
INDEXER = {"index_topk": 7, "index_head_dim": 16, "index_n_heads": 24}
SPARSE = LATENT | EXPERTS | INDEXER | TOKENS
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}

PLAIN = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}
# what they do beside plain attention, layers with a state, layers that choose
MODELS = PLAIN | {
    "PhiMoE, a window only in the mask": (
        "PhimoeConfig",
        MOE | {"sliding_window": 5, "router_jitter_noise": 0.0},
    ),
    "ModernBERT, layers before the projection": (
        "ModernBertDecoderConfig",
        TOKENS
        | {"local_attention": 6, "global_attn_every_n_layers": 2}
        | {"cls_token_id": 3, "sep_token_id": 4},
    ),
    "Gemma 2, soft caps and a window": (
        "Gemma2Config",
        {
            "sliding_window": 6,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "Gemma 4, shared keys": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 6,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "Cohere, scaled logits": ("CohereConfig", {"logit_scale": 0.3}),
    "Granite, scaled logits": ("GraniteConfig", {"logits_scaling": 3.0}),
    "gpt-oss, sinks and a window": ("GptOssConfig", MOE | {"sliding_window": 6}),
    "Llama 4, chunks": (
        "Llama4TextConfig",
        MOE
        | {
            "attention_chunk_size": 6,
            "intermediate_size_mlp": 16,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA | EXPERTS),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5 with experts": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS),
    "OLMo hybrid": ("OlmoHybridConfig", DELTA | TOKENS),
    "Kimi Linear": (
        "KimiLinearConfig",
        DELTA
        | LATENT
        | EXPERTS
        | TOKENS
        | {"linear_num_heads": 2, "linear_head_dim": 8},
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        STATES
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8}
        | {"layers_block_type": ["mamba", "attention"]},
    ),
    "Falcon-H1": ("FalconH1Config", MAMBA),
    "Bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1]}),
    "Granite hybrid": (
        "GraniteMoeHybridConfig",
        MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"]},
    ),
    "Mamba 2": (
        "Mamba2Config",
        STATES | {"num_heads": 4, "head_dim": 16, "state_size": 8},
    ),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "DeepSeek-V3": ("DeepseekV3Config", EXPERTS | TOKENS | LATENT),
    "DeepSeek-V3.2": ("DeepseekV32Config", SPARSE),
    "GLM-5": ("GlmMoeDsaConfig", SPARSE),
}


def make(name, dtype=torch.float64, seed=0, **changes):
    """A model in training mode; norms, biases and sinks do something in those not plain."""
    torch.manual_seed(seed)
    kind, own = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**SIZES | own | changes),
        attn_implementation="trajkit",
        experts_implementation="eager",
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and name not in PLAIN:
                parameter.add_(torch.rand_like(parameter) * 0.3)
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


def row_logprobs(model, rows, attention="eager"):
    """Of every token of every row given those before it; 0 for the first of a row.

    Without an attention the model runs as it is.
    """
    if attention is not None:
        model.set_attn_implementation(attention)
    parts = []
    for row in rows["input_ids"].to_pylist():
        ids = torch.tensor(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(1)[torch.arange(len(row) - 1), ids[1:]]
        parts += [chosen.new_zeros(1), chosen]
    if attention is not None:
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
