"""A record from a file, read key by key, each of its kind and none left over."""

from collections.abc import Mapping
from typing import TypeVar

from trajkit.errors import FormatError

Value = TypeVar("Value")


class Fields:
    """The keys of one object.

    Parameters
    ----------
    record : object
        What must be an object.
    place : str
        Where it stands, for messages.

    Raises
    ------
    FormatError
        It is no object. Every method raises it where a value is of another kind.
    """

    def __init__(self, record: object, place: str) -> None:
        if not isinstance(record, dict):
            raise FormatError(f"{place}: {type(record).__name__}, not an object")
        self.place = place
        self._left: dict[str, object] = dict(record)

    def text(self, name: str, default: str | None = None) -> str:
        """A text; one that has no default is needed."""
        return self._take(name, str, default)

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self._left.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            self._left[name] = float(value)
        number = self._take(name, float, default)
        if value is not None and not 0 < number < float("inf"):
            raise FormatError(f"{self.place}: {name} = {number:g} is not above 0")
        return number

    def count(self, name: str) -> int | None:
        """A whole number of at least 1, or None where there is none."""
        if name not in self._left:
            return None
        number = self._take(name, int)
        if isinstance(number, bool) or number < 1:
            raise FormatError(f"{self.place}: {name} = {number} is not at least 1")
        return number

    def flag(self, name: str) -> bool:
        """True or false, and false where it is missing."""
        return self._take(name, bool, False)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of texts; none where it is missing."""
        values = self._take(name, list, [])
        if not all(isinstance(value, str) for value in values):
            raise FormatError(f"{self.place}: {name} is not a list of texts")
        return tuple(values)

    def mapping(self, name: str) -> Mapping[str, object]:
        """An object, whatever is in it; an empty one where it is missing."""
        empty: dict[str, object] = {}
        return self._take(name, dict, empty)

    def texts(self, name: str) -> dict[str, str] | None:
        """Texts by name, or None where there is no such key."""
        if name not in self._left:
            return None
        values = self._take(name, dict)
        if not all(isinstance(value, str) for value in values.values()):
            raise FormatError(f"{self.place}: {name} is not an object of texts")
        return values

    def section(self, name: str) -> "Fields":
        """The object under a key; an empty one where it is missing."""
        return Fields(self._left.pop(name, {}), f"{self.place}: {name}")

    def end(self) -> None:
        """Refuse what nobody asked for."""
        if self._left:
            raise FormatError(f"{self.place}: unknown keys: {', '.join(self._left)}")

    def _take(
        self, name: str, kind: type[Value], default: Value | None = None
    ) -> Value:
        if name not in self._left and default is not None:
            return default
        value = self._left.pop(name, None)
        if not isinstance(value, kind):
            said = "missing" if value is None else f"{value!r}"
            raise FormatError(f"{self.place}: {name} is {said}, not {kind.__name__}")
        return value
