"""The tokenizer as the engine needs it: which tokens spell which bytes."""

import json
from functools import cache
from importlib.resources import files

from tokenizers import Tokenizer

END = "<|im_end|>"


class Node:
    """A run of bytes that some token starts with."""

    __slots__ = ("below", "token")

    def __init__(self) -> None:
        self.below: dict[int, Node] = {}
        # the token that is spelled by exactly this run; None: no token is
        self.token: int | None = None


class Vocabulary:
    """Bytes of every token, and every token of some bytes.

    Parameters
    ----------
    tokenizer_json : str
        A ``tokenizer.json`` with a byte-level BPE model in which each byte is a token.

    Attributes
    ----------
    size : int
        Ids lie in ``[0, size)``.
    spelling : list of bytes
        What each id adds to the text.
    added : dict of str to int
        The added tokens by their text.
    trie : Node
        The ordinary tokens by their bytes.
    """

    def __init__(self, tokenizer_json: str) -> None:
        content = json.loads(tokenizer_json)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        # the same merges, blind to added tokens
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
        """The text of some ids, control tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def encode(self, text: str) -> list[int]:
        """The canonical ids of a text; what spells an added token becomes it."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The canonical ids of a text that is taken to hold no added token."""
        ids: list[int] = self._plain.encode(text).ids
        return ids


def tokenizer_json() -> str:
    """The text of the tokenizer file that ships with this package."""
    return files("trajkit_shim.embedded").joinpath("tokenizer.json").read_text("utf-8")


@cache
def shipped() -> Vocabulary:
    """The vocabulary of the tokenizer that ships with this package."""
    return Vocabulary(tokenizer_json())


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: which byte each character of a token stands for.

    Printable bytes stand for themselves, the others are moved past U+0100 in their
    order (GPT-2's ``bytes_to_unicode``).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(moved)
    }
