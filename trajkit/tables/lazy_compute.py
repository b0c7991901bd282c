"""pyarrow.compute, imported on first use.

Importing it takes as long as numpy and the rest of pyarrow together. A command line that
prints its help, or a program that only records, does not need it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import pyarrow.compute

    found = getattr(pyarrow.compute, name)
    globals()[name] = found
    return found
