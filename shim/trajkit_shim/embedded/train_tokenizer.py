"""The recipe of ``tokenizer.json``: run this file to write it again.

A byte-level BPE tokenizer trained on the source text of Python's standard library,
which is read and not copied: the file holds the merges that the text gave. The same
Python version gives the same file, byte for byte; the one beside was written
with CPython 3.11.7 and tokenizers 0.23.3.

    python -m trajkit_shim.embedded.train_tokenizer [OUT]
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 3000
# ids VOCABULARY.. in this order
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def corpus() -> Iterator[str]:
    """Every top-level module of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield path.read_text(encoding="utf-8")


def train(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``VOCABULARY`` tokens and the added ones.

    Every single byte is a token, so every text has a segmentation.
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
    # not special: they stay in what decoding with skip_special_tokens gives
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return tokenizer


def main() -> None:
    """Write the tokenizer to the path given, or over the one beside this file."""
    beside = Path(__file__).with_name("tokenizer.json")
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else beside
    out.write_text(train(corpus()).to_str(pretty=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
