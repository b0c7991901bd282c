"""Numbers and tables for people."""

from collections.abc import Sequence


def share(part: int, whole: int) -> str:
    """``part`` of ``whole`` in percent; empty if ``whole`` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def text_table(head: Sequence[str], lines: Sequence[Sequence[str | int]]) -> str:
    """Lines under a head; numbers are right-aligned, text is left-aligned."""
    cells = [[f"{c:,}" if isinstance(c, int) else c for c in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = (
        [isinstance(cell, int) for cell in lines[0]] if lines else [False] * len(head)
    )

    def line(values: Sequence[str]) -> str:
        padded = (
            value.rjust(width) if to_right else value.ljust(width)
            for value, width, to_right in zip(values, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [head, ["-" * width for width in widths], *cells]))
