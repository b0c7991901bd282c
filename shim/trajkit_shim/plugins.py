"""What is found by its name: one module of a package, or an import path."""

import importlib
import pkgutil
from importlib.util import find_spec
from typing import TypeVar

Kind = TypeVar("Kind")


def names_in(package: str) -> list[str]:
    """The names of a package's modules, with hyphens, sorted."""
    path = importlib.import_module(package).__path__
    return sorted(found.name.replace("_", "-") for found in pkgutil.iter_modules(path))


def load(name: str, package: str, attribute: str, kind: type[Kind]) -> Kind:
    """The object of a name.

    Parameters
    ----------
    name : str
        A module of the package (``-`` stands for ``_``), which has the object under
        ``attribute``; or an import path, ``package.module:attribute``.
    package, attribute : str
    kind : type
        What it must be an instance of.

    Raises
    ------
    ValueError
        Nothing has that name, or what has it is of another kind.
    """
    module, colon, wanted = name.partition(":")
    if not colon:
        module, wanted = f"{package}.{name.replace('-', '_')}", attribute
        known = names_in(package)
        if name.replace("_", "-") not in known:
            raise ValueError(
                f"{name!r} is none of {', '.join(known)}, and no import path "
                "(package.module:name)"
            )
    elif find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"{name!r}: there is no package {module.partition('.')[0]!r}")
    found = getattr(importlib.import_module(module), wanted, None)
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is {type(found).__name__}, not {kind.__name__}")
    return found
