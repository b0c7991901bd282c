"""A model of random parameters, for the tokenizer in the directory.

python make_model.py DIRECTORY [SEED [KIND]]

A Qwen3 of a million parameters; ``experts``: a mixture of 8 experts, 2 per token;
``vision``: a Qwen2.5-VL.
"""

import sys

import torch
import transformers

directory, seed, kind = [*sys.argv[1:], *("0", "")[len(sys.argv) - 2 :]]
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
torch.manual_seed(int(seed))
size = {"hidden_size": 128, "intermediate_size": 256}
config = {
    **size,
    # ids beyond the tokenizer's are in the table, as they are in real models
    "vocab_size": (len(tokenizer) + 63) // 64 * 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": tokenizer.eos_token_id,
    "pad_token_id": tokenizer.pad_token_id,
}
name, model = "Qwen3", "Qwen3ForCausalLM"
if kind == "vision":
    name, model = "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration"
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    seeing = {**size, "depth": 2, "num_heads": 4, "out_hidden_size": 128}
    seeing["fullatt_block_indexes"] = [1]
    tokens = {"vision_start": "vision_start", "vision_end": "vision_end"}
    tokens |= {"image": "image_pad", "video": "video_pad"}
    config = {
        "text_config": config | {"rope_parameters": rope},
        "vision_config": seeing,
        **{
            f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
            for key, token in tokens.items()
        },
    }
else:
    config |= {"head_dim": 32, "tie_word_embeddings": False}
if kind == "experts":
    name, model = "Qwen3Moe", "Qwen3MoeForCausalLM"
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config |= {"moe_intermediate_size": 64, "decoder_sparse_step": 1}
made = getattr(transformers, model)(getattr(transformers, f"{name}Config")(**config))
made.to(torch.bfloat16).save_pretrained(directory)
