"""Loads objects by name, from a module of a package or an import path."""

import importlib
import pkgutil
from importlib.util import find_spec
from typing import TypeVar

Kind = TypeVar("Kind")


def names_in(package: str) -> list[str]:
    """Return the names of a package's modules, with hyphens, sorted."""
    path = importlib.import_module(package).__path__
    return sorted(found.name.replace("_", "-") for found in pkgutil.iter_modules(path))


def load(name: str, package: str, attribute: str, kind: type[Kind]) -> Kind:
    """Return the object with a name.

    ``name``: a module of the package (``-`` for ``_``) whose ``attribute`` is the
    object, or an import path, ``package.module:attribute``. ``kind``: required type of
    the object.

    Raises
    ------
    ValueError
        There is no such object, or it has another type.
    """
    module, colon, wanted = name.partition(":")
    if not colon:
        module, wanted = f"{package}.{name.replace('-', '_')}", attribute
        known = names_in(package)
        if name.replace("_", "-") not in known:
            raise ValueError(
                f"{name!r} is not one of {', '.join(known)}, nor an import path "
                "(package.module:name)"
            )
    elif find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"{name!r}: there is no package {module.partition('.')[0]!r}")
    found = getattr(importlib.import_module(module), wanted, None)
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is {type(found).__name__}, not {kind.__name__}")
    return found
