"""Reads a record from a file key by key, and rejects wrong types and unknown keys."""

from collections.abc import Sequence
from typing import TypeVar

from trajkit.errors import FormatError

Value = TypeVar("Value")


class Fields:
    """The keys of one object; ``location`` is its place in error messages.

    All methods raise `FormatError` for a value of another type.
    """

    def __init__(self, record: object, location: str) -> None:
        if not isinstance(record, dict):
            raise FormatError(f"{location}: {type(record).__name__}, not an object")
        self.location = location
        self._left: dict[str, object] = dict(record)

    def take(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Return a value of a type; required if there is no default."""
        if name not in self._left and default is not None:
            return default
        value = self._left.pop(name, None)
        if not isinstance(value, kind):
            shown = "missing" if value is None else f"{value!r}"
            raise self.error(f"{name} is {shown}, not {kind.__name__}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; required if there is no default."""
        return self.take(name, str, default)

    def number(self, name: str, default: float) -> float:
        """Return a number above 0."""
        value = self._left.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            self._left[name] = float(value)
        number = self.take(name, float, default)
        if value is not None and not 0 < number < float("inf"):
            raise self.error(f"{name} = {number:g} is not above 0")
        return number

    def count(self, name: str) -> int | None:
        """Return an integer of at least 1, or None if it is missing."""
        if name not in self._left:
            return None
        number = self.take(name, int)
        if isinstance(number, bool) or number < 1:
            raise self.error(f"{name} = {number} is not at least 1")
        return number

    def names(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self.take(name, list, list(default))
        if not all(isinstance(value, str) for value in values):
            raise self.error(f"{name} is not a list of strings")
        return tuple(values)

    def texts(self, name: str) -> dict[str, str] | None:
        """Return an object of strings, or None if it is missing."""
        if name not in self._left:
            return None
        values = self.take(name, dict)
        if not all(isinstance(value, str) for value in values.values()):
            raise self.error(f"{name} is not an object of strings")
        return values

    def section(self, name: str) -> "Fields":
        """Return the object under a key, by default an empty one."""
        return Fields(self._left.pop(name, {}), f"{self.location}: {name}")

    def end(self) -> None:
        """Reject keys that were not read."""
        if self._left:
            raise self.error(f"unknown keys: {', '.join(self._left)}")

    def error(self, rule: str) -> FormatError:
        """Return an error at this location."""
        return FormatError(f"{self.location}: {rule}")
