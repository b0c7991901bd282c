"""A Qwen3 mixture of 8 experts, 2 per token, for the tokenizer in the directory.

python make_experts.py DIRECTORY
"""

import sys

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

directory = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(directory)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=(len(tokenizer) + 63) // 64 * 64,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
    decoder_sparse_step=1,
    norm_topk_prob=True,
)
Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
