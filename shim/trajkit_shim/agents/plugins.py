"""Finds objects by a known name or an import path."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, TypeVar

T = TypeVar("T")


def load(name: str, known: Mapping[str, T], kind: type) -> T:
    """Return the object with a name.

    ``name``: one of ``known`` (``_`` for ``-`` is accepted), or an import path,
    ``package.module:attribute``. ``kind``: the type of the object or, if the known ones
    are classes, the base of the class. Raises `ValueError`: there is no such object, or it
    has another type.
    """
    if (found := known.get(name.replace("_", "-"))) is not None:
        return found
    if ":" not in name:
        raise ValueError(
            f"{name!r} is not one of {', '.join(known)}, nor an import path "
            "(package.module:name)"
        )
    try:
        given: Any = resolve_name(name)
    except (AttributeError, ImportError) as error:
        raise ValueError(f"{name!r}: {error}") from error
    is_class = isinstance(given, type)
    shown = f"the class {given.__name__}" if is_class else f"a {type(given).__name__}"
    wants_class = any(isinstance(each, type) for each in known.values())
    fits = (
        is_class and issubclass(given, kind) if wants_class else isinstance(given, kind)
    )
    if not fits:
        role = "a subclass" if wants_class else "an instance"
        raise ValueError(f"{name!r} is {shown}, not {role} of {kind.__name__}")
    return given  # type: ignore[no-any-return]
