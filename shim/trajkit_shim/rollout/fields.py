"""Reads a record from a file key by key, and rejects wrong types and unknown keys."""

from collections.abc import Mapping
from typing import TypeVar

from trajkit.errors import FormatError

Value = TypeVar("Value")


class Fields:
    """The keys of one object; ``place`` is its location in error messages.

    All methods raise `FormatError` for a value of another type.
    """

    def __init__(self, record: object, location: str) -> None:
        if not isinstance(record, dict):
            raise FormatError(f"{location}: {type(record).__name__}, not an object")
        self.location = location
        self._left: dict[str, object] = dict(record)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; required if there is no default."""
        return self._take(name, str, default)

    def number(self, name: str, default: float) -> float:
        """Return a number above 0."""
        value = self._left.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            self._left[name] = float(value)
        number = self._take(name, float, default)
        if value is not None and not 0 < number < float("inf"):
            raise FormatError(f"{self.location}: {name} = {number:g} is not above 0")
        return number

    def count(self, name: str) -> int | None:
        """Return an integer of at least 1, or None if it is missing."""
        if name not in self._left:
            return None
        number = self._take(name, int)
        if isinstance(number, bool) or number < 1:
            raise FormatError(f"{self.location}: {name} = {number} is not at least 1")
        return number

    def flag(self, name: str) -> bool:
        """Return a boolean, by default false."""
        return self._take(name, bool, False)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, by default empty."""
        values = self._take(name, list, [])
        if not all(isinstance(value, str) for value in values):
            raise FormatError(f"{self.location}: {name} is not a list of strings")
        return tuple(values)

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return an object with any content, by default empty."""
        empty: dict[str, object] = {}
        return self._take(name, dict, empty)

    def texts(self, name: str) -> dict[str, str] | None:
        """Return an object of strings, or None if it is missing."""
        if name not in self._left:
            return None
        values = self._take(name, dict)
        if not all(isinstance(value, str) for value in values.values()):
            raise FormatError(f"{self.location}: {name} is not an object of strings")
        return values

    def section(self, name: str) -> "Fields":
        """Return the object under a key, by default an empty one."""
        return Fields(self._left.pop(name, {}), f"{self.location}: {name}")

    def end(self) -> None:
        """Reject keys that were not read."""
        if self._left:
            raise FormatError(f"{self.location}: unknown keys: {', '.join(self._left)}")

    def _take(
        self, name: str, kind: type[Value], default: Value | None = None
    ) -> Value:
        if name not in self._left and default is not None:
            return default
        value = self._left.pop(name, None)
        if not isinstance(value, kind):
            shown = "missing" if value is None else f"{value!r}"
            raise FormatError(
                f"{self.location}: {name} is {shown}, not {kind.__name__}"
            )
        return value
