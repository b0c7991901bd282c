"""The tokenizer as the engine needs it: the bytes of each token."""

import json
from functools import cache
from importlib.resources import files

from tokenizers import Tokenizer

END = "<|im_end|>"


class Node:
    """A byte sequence that some token starts with."""

    __slots__ = ("below", "token")

    def __init__(self) -> None:
        self.below: dict[int, Node] = {}
        # the token with exactly these bytes, if any
        self.token: int | None = None


class Vocabulary:
    """The bytes of every token, and the tokens by their bytes.

    Parameters
    ----------
    tokenizer_json : str
        A ``tokenizer.json`` with a byte-level BPE model in which each byte is a token.

    Attributes
    ----------
    size : int
        Ids are in ``[0, size)``.
    spelling : list of bytes
        The bytes of each id.
    added : dict of str to int
        The added tokens by their text.
    trie : Node
        The ordinary tokens by their bytes.
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
        self.spelling = [b""] * self.size
        self.trie = Node()
        for characters, token in content["model"]["vocab"].items():
            spelled = bytes(byte_of[character] for character in characters)
            self.spelling[token] = spelled
            node = self.trie
            for byte in spelled:
                node = node.below.setdefault(byte, Node())
            node.token = token
        for text, token in self.added.items():
            self.spelling[token] = text.encode()

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, including control tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def encode(self, text: str) -> list[int]:
        """Return the canonical ids of a text, with added tokens recognized."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the canonical ids of a text, without recognizing added tokens."""
        ids: list[int] = self._plain.encode(text).ids
        return ids


def tokenizer_json() -> str:
    """Return the content of the shipped ``tokenizer.json``."""
    return (
        files("trajkit_shim.engines.embedded")
        .joinpath("tokenizer.json")
        .read_text("utf-8")
    )


@cache
def shipped() -> Vocabulary:
    """Return the vocabulary of the shipped tokenizer."""
    return Vocabulary(tokenizer_json())


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
