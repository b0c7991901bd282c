"""Trains the embedded engine's ``tokenizer.json``; run this file to write it again.

It is a byte-level BPE tokenizer trained on the source text of Python's standard library.
The file holds only the resulting merges. The same Python version gives an identical
file; the shipped one was written with CPython 3.11.7 and tokenizers 0.23.3.

    python tests/shim/train_tokenizer.py OUT
"""

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 3000
# their ids start at VOCABULARY, in this order
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of ``VOCABULARY`` tokens and the added ones.

    Every byte is a token, so every text can be tokenized.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    # not special: decoding with skip_special_tokens keeps them
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return tokenizer


if __name__ == "__main__":
    # every top-level module of the standard library, in order of their names
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = train(path.read_text("utf-8") for path in paths).to_str(pretty=False) + "\n"
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
