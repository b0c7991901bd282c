"""A package in which every name exists, for imports of what is never used.

A lower-case name is a submodule, which can also be imported and called; a capitalised
one is an empty class.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class _Named(type):
    """The type of the empty classes: what is looked up on one is its own name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Package(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found = _Named(name, (), {"__module__": self.__name__})
        else:
            found = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Decorating(_Package):
    """``@name`` and ``@name(...)`` leave what they decorate as it is."""

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda decorated: decorated


class _Refusing(_Package):
    """Nothing that is only a name may be called."""

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a stand-in and cannot be called")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of a package."""

    def __init__(self, package, kind):
        self.package = package
        self.kind = kind

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{self.package}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return self.kind(spec.name)

    def exec_module(self, module):
        pass


def stand_in(package, *, may_be_called):
    """Give the named package, which is being imported, every name that it lacks."""
    kind = _Decorating if may_be_called else _Refusing
    sys.modules[package].__class__ = kind
    sys.meta_path.insert(0, _Finder(package, kind))
