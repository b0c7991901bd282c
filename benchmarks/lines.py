"""A line of the table that `python -m benchmarks` prints."""

from dataclasses import dataclass

HEAD = """\
| what | trajkit | compared with | | speedup |
| --- | ---: | --- | ---: | ---: |"""

# of a second, a byte or one, by the unit that they are shown in
_UNITS = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "MiB": 2**20, "bytes": 1, "tokens": 1}
_UNITS |= {"GB/s": 1e9, "M tokens/s": 1e6}


@dataclass(frozen=True, slots=True)
class Line:
    """What was measured, and what it is compared with.

    Attributes
    ----------
    what : str
    figure : float
        In seconds, bytes, tokens, or one of them per second.
    unit : str
        In which both figures are shown.
    alternative : str
        Its name, or an empty string.
    other : float
        Its figure.
    more : bool
        Whether more is better.
    """

    what: str
    figure: float
    unit: str
    alternative: str = ""
    other: float = 0.0
    more: bool = False

    @property
    def speedup(self) -> float:
        """The alternative's figure by this one, or the inverse if more is better."""
        speedup = self.other / self.figure
        return 1 / speedup if self.more else speedup

    def __str__(self) -> str:
        figure = _shown(self.figure, self.unit)
        if not self.alternative:
            return f"| {self.what} | {figure} | | | |"
        other, speedup = _shown(self.other, self.unit), _digits(self.speedup)
        return f"| {self.what} | {figure} | {self.alternative} | {other} | {speedup} |"


def _shown(value: float, unit: str) -> str:
    number = value / _UNITS[unit]
    text = f"{number:,.0f}" if _UNITS[unit] == 1 else _digits(number)
    return f"{text} {unit}"


def _digits(number: float) -> str:
    """Three digits of a number, or all before the point; at least a thousandth."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 10:
        return f"{number:.1f}"
    return f"{number:.2f}" if number >= 1 else f"{number:.3f}"
