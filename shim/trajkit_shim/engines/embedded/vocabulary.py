"""The shipped tokenizer: as the engine needs it, and as a transformers tokenizer."""

import json
import os
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"


class Vocabulary:
    """The bytes of every token of a byte-level BPE model in which each byte is a token.

    ``size``: ids are in ``[0, size)``. ``spelling``: the bytes of each id. ``added``:
    the added tokens by their text. ``by_bytes``: the ordinary tokens, of at most
    ``longest`` bytes.
    """

    def __init__(self, tokenizer_json: str) -> None:
        content = json.loads(tokenizer_json)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        # the same merges, without added tokens
        self._plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.added: dict[str, int] = {
            token["content"]: token["id"] for token in content["added_tokens"]
        }
        byte_of = _byte_of_character()
        self.by_bytes: dict[bytes, int] = {
            bytes(map(byte_of.__getitem__, characters)): token
            for characters, token in content["model"]["vocab"].items()
        }
        self.longest = max(map(len, self.by_bytes))
        self.spelling = [b""] * self.size
        for spelled, token in self.by_bytes.items():
            self.spelling[token] = spelled
        for text, token in self.added.items():
            self.spelling[token] = text.encode()

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, including control tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Return the canonical ids of a text, with added tokens recognized."""
        return list(self._tokenizer.encode(text).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Return the canonical ids of a text, without recognizing added tokens."""
        return list(self._plain.encode(text).ids)


def _shipped_file(name: str) -> str:
    return files("trajkit_shim.engines.embedded").joinpath(name).read_text("utf-8")


@cache
def shipped() -> Vocabulary:
    """Return the vocabulary of the shipped tokenizer."""
    return Vocabulary(_shipped_file("tokenizer.json"))


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """The embedded engine's tokenizer, with its chat template. Imports transformers."""
    # otherwise transformers warns about missing PyTorch, which is not needed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(_shipped_file("tokenizer.json")),
        chat_template=_shipped_file("chat_template.jinja"),
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: the byte for each character of a token.

    Printable bytes represent themselves; the others are shifted past U+0100 in order
    (GPT-2's ``bytes_to_unicode``).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(moved)
    }
