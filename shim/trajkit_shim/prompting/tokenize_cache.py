"""Tokenizes texts piece by piece, each piece once.

Most of a prompt equals the prompt before it. A piece is the text between two special
tokens, about one per message. A piece that was seen before, in any session, is not
tokenized again, so rendering a conversation costs only what is new.
"""

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# bytes of a piece besides its characters and tokens: the entry, its key and its arrays
_OVERHEAD = 512


class Piece:
    """A text's ids, and the characters each of them covers."""

    __slots__ = ("ids", "n_bytes", "offsets")

    def __init__(self, text: str, tokenizer: "Tokenizer") -> None:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        # int32, shape (n_ids,)
        self.ids = np.array(encoded.ids, np.int32)
        # int32, shape (n_ids, 2): characters offsets[i, 0]:offsets[i, 1]
        self.offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
        self.n_bytes = _OVERHEAD + 4 * len(text) + self.ids.nbytes + self.offsets.nbytes


class TokenizeCache:
    """The latest pieces, up to ``max_bytes``. Safe to use from several threads."""

    def __init__(self, tokenizer: "Tokenizer", max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[str, Piece] = OrderedDict()
        self._lock = Lock()
        self.n_bytes = 0
        self.n_tokenized = 0  # total number of characters tokenized

    def __call__(self, text: str) -> Piece:
        """Tokenize a text; special tokens in it are encoded as text."""
        with self._lock:
            piece = self._pieces.get(text)
            if piece is not None:
                self._pieces.move_to_end(text)
                return piece
        piece = Piece(text, self._tokenizer)
        with self._lock:
            self.n_tokenized += len(text)
            if text not in self._pieces and piece.n_bytes <= self._max_bytes:
                self._pieces[text] = piece
                self.n_bytes += piece.n_bytes
            while self.n_bytes > self._max_bytes:
                _, oldest = self._pieces.popitem(last=False)
                self.n_bytes -= oldest.n_bytes
        return piece
