"""Remembers which session ids were used when there are too many to store."""

from hashlib import blake2b

_BITS = 1 << 26
_PROBES = 4


class UsedIds:
    """A Bloom filter of session ids: 4 probes in 2^26 bits.

    An added id is always found. The probability that another id is found by mistake is
    1e-7 after 100,000 ids and 1e-5 after a million. Takes 8 MiB from the first id on.
    """

    def __init__(self) -> None:
        self._bits: bytearray | None = None

    def add(self, name: str) -> None:
        """Remember an id."""
        if self._bits is None:
            self._bits = bytearray(_BITS // 8)
        for bit in _bit_indices(name):
            self._bits[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, name: str) -> bool:
        bits = self._bits
        return bits is not None and all(
            bits[bit >> 3] & 1 << (bit & 7) for bit in _bit_indices(name)
        )


def _bit_indices(name: str) -> list[int]:
    digest = blake2b(name.encode(), digest_size=4 * _PROBES).digest()
    return [
        int.from_bytes(digest[offset : offset + 4], "little") % _BITS
        for offset in range(0, len(digest), 4)
    ]
