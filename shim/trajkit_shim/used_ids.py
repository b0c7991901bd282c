"""Which session ids were used, when there are too many to keep."""

from hashlib import blake2b

_BITS = 1 << 26
_PROBES = 4


class UsedIds:
    """Says of every id that was added that it was; of another one it may be wrong.

    It takes 8 MiB from the first id on, and never more. Of ids that were not added it
    calls one in 10 million used after 100,000, one in 100,000 after a million (a Bloom
    filter of 4 probes in 2^26 bits).
    """

    def __init__(self) -> None:
        self._bits: bytearray | None = None

    def add(self, name: str) -> None:
        """Remember an id."""
        if self._bits is None:
            self._bits = bytearray(_BITS // 8)
        for place in _places(name):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, name: str) -> bool:
        bits = self._bits
        return bits is not None and all(
            bits[place >> 3] & 1 << (place & 7) for place in _places(name)
        )


def _places(name: str) -> list[int]:
    digest = blake2b(name.encode(), digest_size=4 * _PROBES).digest()
    return [
        int.from_bytes(digest[at : at + 4], "little") % _BITS
        for at in range(0, len(digest), 4)
    ]
