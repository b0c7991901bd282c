"""Texts to ids piece by piece, each piece tokenized once.

A prompt is mostly the prompt before it. Its pieces are what stands between special
tokens, about one per message, and a piece that was met before is not tokenized again,
whichever session it came from. So rendering a conversation anew costs what is new of it.
"""

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# of a piece beside its characters and tokens: the entry, its key and its arrays
_OVERHEAD = 512


class Piece:
    """One text's ids, and where each of them stands in it."""

    __slots__ = ("ids", "n_bytes", "places")

    def __init__(self, text: str, tokenizer: "Tokenizer") -> None:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        # int32, shape (n_ids,)
        self.ids: npt.NDArray[np.int32] = np.array(encoded.ids, np.int32)
        # int32, shape (n_ids, 2): characters places[i, 0]:places[i, 1]
        self.places: npt.NDArray[np.int32] = np.array(
            encoded.offsets, np.int32
        ).reshape(-1, 2)
        self.n_bytes = _OVERHEAD + 4 * len(text) + self.ids.nbytes + self.places.nbytes


class PieceCache:
    """The pieces met last, up to a bound. Safe to call from several threads at once.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    max_bytes : int
        Of all pieces that are kept. 0: none is.
    """

    def __init__(self, tokenizer: "Tokenizer", max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[str, Piece] = OrderedDict()
        self._lock = Lock()
        self.n_bytes = 0
        # characters that were tokenized, ever
        self.n_tokenized = 0

    def __call__(self, text: str) -> Piece:
        """The text's ids, special tokens in it taken for text."""
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
