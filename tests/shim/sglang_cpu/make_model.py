"""A Qwen3 of a million random parameters, for the tokenizer in the directory.

python make_model.py DIRECTORY [SEED]
"""

import sys

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

directory = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(directory)
torch.manual_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
config = Qwen3Config(
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
)
Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
