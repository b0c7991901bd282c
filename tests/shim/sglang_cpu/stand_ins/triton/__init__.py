"""A triton without a compiler: kernels can be defined, and none is ever launched."""

import importlib

from stand_in import stand_in

__version__ = "3.8.0"


def cdiv(a, b):
    """``a / b``, rounded up."""
    return -(a // -b)


def next_power_of_2(n):
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


class Config:
    """One choice of an autotuned kernel's parameters."""

    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **options):
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


class _Constant:
    """``triton.language.constexpr``: a value that a kernel was compiled with."""

    def __init__(self, value=None):
        self.value = value


stand_in(__name__, may_be_called=True)
importlib.import_module("triton.language").constexpr = _Constant
importlib.import_module("triton.compiler.compiler").triton_key = lambda: "stand-in"
