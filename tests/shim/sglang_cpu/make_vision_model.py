"""A Qwen2.5-VL of random parameters, with the embedded engine's tokenizer.

python make_vision_model.py DIRECTORY

This needs torch. Tests, which need none, have written tokenizer and processor before.
"""

import json
import sys
from pathlib import Path

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TOKENS = {
    name: f"<|{name}|>"
    for name in ("vision_start", "vision_end", "image_pad", "video_pad")
}
_PART = "{{- part.text -}}"
_SHOWN = f'{{{{- "{IMAGE}" if part.type == "image" else part.text -}}}}'


def write_processor(directory):
    """Write a tokenizer with places for images, and the processor."""
    from tests.shim.fakes import load_tokenizer

    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    assert _PART in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(_PART, _SHOWN)
    tokenizer.save_pretrained(directory)
    settings = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    path = Path(directory) / "preprocessor_config.json"
    path.write_text(json.dumps(settings), "utf-8")


def main(directory):
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = {name: tokenizer.convert_tokens_to_ids(TOKENS[name]) for name in TOKENS}
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256}
    config = Qwen2_5_VLConfig(
        text_config={
            **size,
            # ids beyond the tokenizer's are in the table, as they are in real models
            "vocab_size": (len(tokenizer) + 63) // 64 * 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 65536,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            **size,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1])
