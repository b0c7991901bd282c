"""A Qwen3 of random parameters, for the tokenizer in the directory.

python make_model.py DIRECTORY [SEED [experts]]

A million parameters, or a mixture of 8 experts, 2 per token.
"""

import sys

import torch
import transformers

directory, seed, kind = [*sys.argv[1:], *("0", "")[len(sys.argv) - 2 :]]
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
torch.manual_seed(int(seed))
name, more = "Qwen3", {}
if kind == "experts":
    name, more = "Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2}
    more |= {"moe_intermediate_size": 64, "decoder_sparse_step": 1}
    more |= {"norm_topk_prob": True}
config = getattr(transformers, f"{name}Config")(
    # ids beyond the tokenizer's are in the table, as they are in real models
    vocab_size=(len(tokenizer) + 63) // 64 * 64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=65536,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
    **more,
)
model = getattr(transformers, f"{name}ForCausalLM")(config)
model.to(torch.bfloat16).save_pretrained(directory)
