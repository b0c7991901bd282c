"""The bytes of tokens: a token may end inside a character."""

from typing import Any

from trajkit.analysis.tokenizer import Codec, Tokenizer

_REPLACEMENT = "\ufffd"
# how SentencePiece writes a space
_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The characters for which byte-level BPE writes bytes (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


class Vocabulary:
    """The text of single tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._codec = Codec(tokenizer)
        self._piece = getattr(
            tokenizer,
            "id_to_token",
            getattr(tokenizer, "convert_ids_to_tokens", lambda _: None),
        )

    def pieces(self, ids: list[int]) -> dict[str, Any]:
        """Columns of the tokens: id, text, bytes in hexadecimal, whether it is special.

        Of text and bytes one is null: bytes are given for a token that is not text on its
        own, because it begins or ends inside a character.
        """
        ids = sorted(ids)
        texts: list[str | None] = []
        hexes: list[str | None] = []
        special: list[int] = []
        for token in ids:
            text = self._codec.text([token])
            raw = self._bytes(token) if _REPLACEMENT in text else None
            texts.append(self._spaced(token, text) if raw is None else None)
            hexes.append(None if raw is None else raw.hex())
            special.append(int(bool(text) and not self._codec.plain([token])))
        return {"id": ids, "text": texts, "hex": hexes, "special": special}

    def _spaced(self, token: int, text: str) -> str:
        """The text with the space that SentencePiece drops at the start of a text."""
        piece = self._piece(token)
        spaced = (piece or "").replace(_SPACE, " ")
        return spaced if spaced.lstrip(" ") == text.lstrip(" ") else text

    def _bytes(self, token: int) -> bytes | None:
        """The token's bytes by its entry in the vocabulary; None if it shows none."""
        piece = self._piece(token)
        if piece is None:
            return None
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        if all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        return None
