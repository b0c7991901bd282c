"""Tokenizes texts piece by piece, each piece once.

Most of a prompt equals the prompt before it. A piece is the text between two special
tokens, about one per message. A piece that was seen before, in any session, is not
tokenized again, so rendering a conversation costs only what is new.
"""

import os
from collections import OrderedDict
from contextlib import nullcontext
from itertools import chain
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING

import numpy as np

from trajkit_shim.engines.checks import too_long
from trajkit_shim.prompting.attribution import Encoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# bytes of a piece besides its characters and tokens: the entry, its key and its arrays
_OVERHEAD = 512

NO_LIMIT = 2**31 - 1
"""More tokens than any text has."""

_SHORT = 1 << 12  # characters of a text that takes about a millisecond
_LONG = 1 << 17  # characters of a text that takes tens of milliseconds
# short texts do not wait for the processors that long ones use
_long_texts = BoundedSemaphore(max(1, (os.cpu_count() or 1) // 2))


def encode(tokenizer: "Tokenizer", text: str, max_tokens: int = NO_LIMIT) -> Encoded:
    """Tokenize a text without special tokens; other threads run meanwhile."""
    if len(text) <= _SHORT:
        # another thread would take longer to wake up than this takes
        encoded = tokenizer.encode(text, add_special_tokens=False)
    else:
        with _long_texts if len(text) > _LONG else nullcontext():
            # unlike encode, this releases the interpreter
            (encoded,) = tokenizer.encode_batch([text], add_special_tokens=False)
    n_tokens = len(encoded)
    if n_tokens > max_tokens:
        # the error's traceback would keep it until a garbage collection, in which freeing
        # it would halt all threads
        del encoded
        raise too_long(n_tokens, max_tokens, "at least ")
    sides = chain.from_iterable(
        encoded.offsets
        if len(text) <= _LONG
        # lets other threads run, which the list of all offsets does not
        else (encoded.token_to_chars(i) or () for i in range(n_tokens))
    )
    offsets = np.fromiter(sides, np.int32, 2 * n_tokens).reshape(-1, 2)
    return Encoded(np.array(encoded.ids, np.int32), offsets)


class TokenizeCache:
    """The latest pieces, up to ``max_bytes``. Safe to use from several threads."""

    def __init__(self, tokenizer: "Tokenizer", max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[str, Encoded] = OrderedDict()
        self._lock = Lock()
        self.n_bytes = 0

    def __call__(self, text: str, max_tokens: int = NO_LIMIT) -> Encoded:
        """Tokenize a text as `encode`."""
        with self._lock:
            piece = self._pieces.get(text)
            if piece is not None:
                self._pieces.move_to_end(text)
                return piece
        piece = encode(self._tokenizer, text, max_tokens)
        with self._lock:
            n_bytes = _n_bytes(text, piece)
            if text not in self._pieces and n_bytes <= self._max_bytes:
                self._pieces[text] = piece
                self.n_bytes += n_bytes
            while self.n_bytes > self._max_bytes:
                self.n_bytes -= _n_bytes(*self._pieces.popitem(last=False))
        return piece


def _n_bytes(text: str, piece: Encoded) -> int:
    return _OVERHEAD + 4 * len(text) + piece.ids.nbytes + piece.offsets.nbytes
