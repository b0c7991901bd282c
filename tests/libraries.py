"""The array libraries that are here: numpy, and torch where it is installed."""

import importlib
import importlib.util

import numpy as np

LIBRARIES = [n for n in ("numpy", "torch") if importlib.util.find_spec(n)]


def tensor(values, library, requires_grad=False):
    """The values as an array of 64-bit floats, or as a leaf tensor of them."""
    if library == "numpy":
        return np.array(values, np.float64)
    torch = importlib.import_module("torch")
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def joined(parts, like):
    """Arrays of one library end to end."""
    if isinstance(like, np.ndarray):
        return np.concatenate([np.empty(0), *parts])
    return importlib.import_module("torch").cat([like.new_empty(0), *parts])
