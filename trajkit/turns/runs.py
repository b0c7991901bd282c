"""Where the prompts of a session start over, and which keys change there.

A call continues an earlier one if its prompt begins with that one's prompt. A key names
runs if it changes where prompts start over, and stays where one continues another.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Prompts:
    """The prompts of a session so far, as bytes, with a value of each."""

    def __init__(self) -> None:
        # values by the size and the hash of their prompt
        self._known: dict[int, dict[int, list[Any]]] = {}

    def add(self, prompt: bytes, value: Any = None) -> None:
        same_size = self._known.setdefault(len(prompt), {})
        same_size.setdefault(hash(prompt), []).append(value)

    def extended(self, prompt: bytes) -> list[Any]:
        """The values of the longest prompt that this one begins with and extends."""
        for size in sorted(self._known, reverse=True):
            if 0 < size < len(prompt):
                if found := self._known[size].get(hash(prompt[:size])):
                    return found
        return []


class Change(NamedTuple):
    """Where a key first changes as the prompts of a session start over."""

    key: str
    session: Any
    place: Any
    before: object
    now: object


class Starts:
    """The calls of sessions so far, and the keys that change where prompts start over."""

    def __init__(self) -> None:
        self._prompts: dict[Any, Prompts] = defaultdict(Prompts)
        # the latest values of each session
        self._last: dict[Any, dict[str, object]] = defaultdict(dict)
        self._changes: dict[tuple[str, Any], Change] = {}
        # keys that change where a prompt continues another
        self._never = set[str]()

    def add(
        self,
        session: Any,
        prompt: bytes,
        names: Mapping[str, object],
        place: Any = None,
    ) -> None:
        """Add a call with the keys that may name its run. Without a prompt it is none."""
        if not prompt:
            return
        last, prompts = self._last[session], self._prompts[session]
        # those that it may continue have the most of its prompt
        same = names.items() <= last.items()
        nearest = [] if same else prompts.extended(prompt)
        for key, now in names.items():
            others = [one[key] for one in nearest if key in one]
            if others and now not in others:
                self._never.add(key)
            elif not nearest and last.get(key, now) != now:
                change = Change(key, session, place, last[key], now)
                self._changes.setdefault((key, session), change)
        prompts.add(prompt, names)
        last.update(names)

    def changes(self) -> Iterator[Change]:
        """The first change of each key, in each session, that may name runs."""
        return (one for one in self._changes.values() if one.key not in self._never)
