"""Names and records that Python and the compiled kernels share, compared at import."""

from collections.abc import Sequence

from trajkit import _core
from trajkit._core import DTYPES

# the numpy dtypes of _native/structs.pxd
CALL, REQUEST = DTYPES["Call"], DTYPES["Request"]
LINK, ROW, CHOICES = DTYPES["Link"], DTYPES["Row"], DTYPES["Choices"]
PACK_ROW = DTYPES["PackRow"]


def members(start: str) -> dict[str, int]:
    """The members of an enum of the kernels, which begin with ``start``, in order."""
    found = ((name, n) for name, n in vars(_core).items() if name.startswith(start))
    in_order = sorted(found, key=lambda one: one[1])
    return {name.removeprefix(start).lower(): n for name, n in in_order}


STOPS = members("STOP_")
"""The finish reasons that decide something, and ``stop`` of a call that ended so."""


def numbers(start: str, names: Sequence[str]) -> dict[str, int]:
    """The kernels' number for each name of an enum.

    Raises ImportError unless the kernels have these names in this order: another one would
    exchange meanings.
    """
    known = members(start)
    if tuple(known) != tuple(names):
        raise ImportError(
            f"the kernels have the names {', '.join(known)} of {start}, and Python has "
            f"{', '.join(names)}: write both in one order (_native/), and build "
            "trajkit._core again: python setup.py build_ext --inplace"
        )
    return known
