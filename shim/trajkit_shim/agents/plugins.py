"""Finds objects by a known name or an import path."""

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def load(name: str, known: Mapping[str, T], kind: type) -> T:
    """Return the object with a name.

    ``name``: one of ``known`` (``_`` for ``-`` is accepted), or an import path,
    ``package.module:attribute``. ``kind``: the type of the object, or the base of a class.

    Raises
    ------
    ValueError
        There is no such object, or it has another type.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        found = known.get(name.replace("_", "-"))
        if found is None:
            raise ValueError(
                f"{name!r} is not one of {', '.join(known)}, nor an import path "
                "(package.module:name)"
            )
        return found
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise ValueError(f"{name!r}: there is no package {package!r}")
    # its type is checked
    given: Any = getattr(importlib.import_module(module), attribute, None)
    fits = issubclass if isinstance(given, type) else isinstance
    if not fits(given, kind):
        raise ValueError(f"{name!r} is {type(given).__name__}, not {kind.__name__}")
    return given  # type: ignore[no-any-return]
