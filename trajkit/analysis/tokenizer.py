"""The tokenizer interface: ids to text and back, for tokenizers of any library."""

import re
from functools import cache
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trajkit.errors import ArgumentError

Ids = npt.NDArray[np.int32]

# Bytes as byte-level BPE writes them: printable ones as themselves, the others as
# U+0100 and up, in order (openai/gpt-2, encoder.py, bytes_to_unicode).
_PRINTED = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + k): byte for k, byte in enumerate(_HIDDEN)}
# A byte as SentencePiece writes it.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer of transformers, a ``tokenizers.Tokenizer``, or a similar object.

    ``encode`` returns ids, or an object with an attribute ``ids``. Tokens that are parts of
    a character are told apart if there is a method ``id_to_token`` or
    ``convert_ids_to_tokens``.
    """

    def encode(self, text: str, /, *, add_special_tokens: bool) -> object:
        """The ids of a text, which may contain special tokens."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """The text of ids, with or without special tokens."""


class Codec:
    """Encodes and decodes with a tokenizer, and knows which tokens are special.

    An id that the tokenizer lacks is written as ``⟨70001⟩``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(tokenizer, name, None)):
                raise ArgumentError(
                    f"tokenizer is of type {type(tokenizer).__name__}, which has no "
                    f"method {name}"
                )
        self._tokenizer = tokenizer
        # transformers may remove white space before punctuation
        tidies = hasattr(tokenizer, "clean_up_tokenization_spaces")
        self._options = {"clean_up_tokenization_spaces": False} if tidies else {}
        # how the tokenizer shows an entry of its vocabulary
        names = ("id_to_token", "convert_ids_to_tokens")
        methods = (getattr(tokenizer, name, None) for name in names)
        self._shows = next(filter(None, methods), None)
        self.entry, self.data = cache(self._entry), cache(self._data)
        self._is_special = cache(self._skipped)

    def text(self, ids: Ids | list[int], *, plain: bool = False) -> str:
        """The text of ids; ``plain``: without special tokens."""
        given = ids.tolist() if isinstance(ids, np.ndarray) else ids
        options = {"skip_special_tokens": plain, **self._options}
        unknown = set[int]()
        if self._shows is not None:
            unknown = {token for token in {*given} if self.entry(token) is None}
        texts = []
        for lacks, run in groupby(given, unknown.__contains__):
            if lacks:
                texts += [f"⟨{token}⟩" for token in run]
            else:
                texts.append(str(self._tokenizer.decode([*run], **options)))
        return "".join(texts)

    def exact(self, ids: Ids) -> str:
        """The text of ids with special tokens, and bytes of split characters as ``\\xe2``.

        Bytes are known of byte-level BPE and of SentencePiece; other tokenizers leave
        the replacement character.
        """
        text = self.text(ids)
        if "\ufffd" not in text:
            return text
        given = b"".join(map(self.data, ids.tolist()))
        if given.decode("utf-8", "replace") != text:
            return text
        return given.decode("utf-8", "backslashreplace")

    def piece(self, token: int) -> str | bytes:
        """The text of a token, or its bytes if it begins or ends inside a character."""
        text, entry = self.text([token]), self.entry(token) or ""
        if "\ufffd" in text and (raw := entry_bytes(entry)):
            return raw
        # SentencePiece writes a space as U+2581, and drops it at the start of a text
        spaced = entry.replace("\u2581", " ")
        return spaced if spaced.lstrip(" ") == text.lstrip(" ") else text

    def _data(self, token: int) -> bytes:
        """The bytes of a token that follows another, which may begin with a space."""
        piece, twice = self.piece(token), self.text([token, token])
        if isinstance(piece, bytes):
            return piece
        once = self.text([token])
        return (twice[len(once) :] if twice.startswith(once) else piece).encode()

    def _entry(self, token: int) -> str | None:
        """The vocabulary's entry for an id; None if the tokenizer does not show it."""
        try:
            name = self._shows(token) if self._shows else None
        except (LookupError, OverflowError, ValueError):  # beyond the vocabulary
            return None
        return None if name is None else str(name)

    def _skipped(self, token: int) -> bool:
        return bool(self.text([token]) and not self.text([token], plain=True))

    def ids(self, text: str) -> Ids:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(getattr(encoded, "ids", encoded), np.int32)

    def special(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which ids are special tokens: those that decoding can skip."""
        distinct, place = np.unique(ids, return_inverse=True)
        flags = np.array([*map(self._is_special, distinct.tolist())], np.bool_)
        found: npt.NDArray[np.bool_] = flags[place]
        return found


def entry_bytes(name: str) -> bytes | None:
    """The bytes of a vocabulary's entry; None if it shows none."""
    if byte := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    if all(char in _BYTES for char in name):
        return bytes(_BYTES[char] for char in name)
    return None
