"""Public names that are imported when they are first used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, names: Mapping[str, str], subpackages: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    names : mapping of str to str
        Public name to the module, within the package, that defines it.
    subpackages : tuple of str
        Subpackages that work as attributes without an import of their own.
    """

    def get(name: str) -> object:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{names[name]}"), name)

    return get, lambda: sorted(names)
