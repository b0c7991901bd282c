"""Public names that are imported when they are first used (PEP 562)."""

import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(
    package: str, modules: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, from its own list of imports.

    The list is the block ``if TYPE_CHECKING:`` of its ``__init__.py``, which type checkers
    read: ``from MODULE import NAME as NAME``. The package's ``modules`` work as attributes,
    too.
    """
    sources: dict[str, str] = dict.fromkeys(modules, package)

    def known() -> dict[str, str]:
        if len(sources) == len(modules):
            sources.update(_imports(package))
        return sources

    def get(name: str) -> object:
        module = known().get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(module), name)

    return get, lambda: sorted(known())


def _imports(package: str) -> dict[str, str]:
    """The module of each name that a package imports for type checkers."""
    spec = sys.modules[package].__spec__
    text = spec.loader.get_data(spec.origin).decode()  # type: ignore[union-attr]
    _, _, block = text.partition("\nif TYPE_CHECKING:\n")
    words = block.partition("\n\n")[0].partition("\nelse:")[0]
    for mark in "(),":
        words = words.replace(mark, " ")
    found, module = {}, ""
    each = words.split()
    for before, word, after in zip(each, each[1:], each[2:], strict=False):
        if before == "from":
            module = word
        elif word == "as":
            found[after] = module
    return found
