"""The bytes of tokens: a token may end inside a character."""

from typing import Any

import numpy as np

from trajkit.analysis.tokenizer import Codec, Tokenizer, entry_bytes

_REPLACEMENT = "\ufffd"
# how SentencePiece writes a space
_SPACE = "\u2581"


class Vocabulary:
    """The text of single tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._codec = Codec(tokenizer)

    def pieces(self, ids: list[int]) -> dict[str, Any]:
        """Columns of the tokens: id, text, bytes in hexadecimal, whether it is special.

        Of text and bytes one is null: bytes are given for a token that is not text on its
        own, because it begins or ends inside a character.
        """
        ids = sorted(ids)
        texts: list[str | None] = []
        hexes: list[str | None] = []
        for token in ids:
            text = self._codec.text([token])
            entry = self._codec.entry(token) or ""
            raw = entry_bytes(entry) if entry and _REPLACEMENT in text else None
            # SentencePiece drops the space at the start of a text
            spaced = entry.replace(_SPACE, " ")
            if spaced.lstrip(" ") == text.lstrip(" "):
                text = spaced
            texts.append(text if raw is None else None)
            hexes.append(None if raw is None else raw.hex())
        special = self._codec.special(np.array(ids, np.int32)).astype(int).tolist()
        return {"id": ids, "text": texts, "hex": hexes, "special": special}
