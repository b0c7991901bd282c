"""Names and records that Python and the compiled kernels share, compared at import."""

from collections.abc import Mapping, Sequence

from trajkit._core import DTYPES, ENUMS

# the numpy dtypes of _native/structs.pxd
CALL, REQUEST = DTYPES["Call"], DTYPES["Request"]
LINK, ROW, CHOICES = DTYPES["Link"], DTYPES["Row"], DTYPES["Choices"]
PACK_ROW = DTYPES["PackRow"]

STOPS = ENUMS["Stop"]
"""The finish reasons that decide something, and ``stop`` of a call that ended so."""


def numbers(enum: str, names: Sequence[str]) -> Mapping[str, int]:
    """The kernels' number for each name of an enum.

    Raises ImportError unless the kernels have these names in this order: another one would
    exchange meanings.
    """
    known = ENUMS[enum]
    if tuple(known) != tuple(names):
        raise ImportError(
            f"the kernels have the names {', '.join(known)} of {enum}, and Python has "
            f"{', '.join(names)}: write both in one order (_native/), and build "
            "trajkit._core again: python setup.py build_ext --inplace"
        )
    return known
