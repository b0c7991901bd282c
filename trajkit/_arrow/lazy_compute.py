"""pyarrow.compute, imported when something of it is first used.

It takes as long to import as numpy and the rest of pyarrow together, and a command line
that prints its help, or a program that only records, has no use for it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import pyarrow.compute

    found = getattr(pyarrow.compute, name)
    globals()[name] = found
    return found
