"""Hostile text in SVG and HTML."""

from html import escape


def escaped(text: object) -> str:
    """The text for markup: escaped, and with U+FFFD for what is not printable.

    XML has no control characters, not even as references. Characters that change the
    direction of text are not printable either.

    Examples
    --------
    >>> escaped("<b>\\x1b")
    '&lt;b&gt;\\ufffd'
    """
    return escape(printable(str(text)))


def words(name: str) -> str:
    """A name of the schema as words."""
    return name.replace("_", " ")


def printable(text: str) -> str:
    """The text with U+FFFD for each character that is not printable."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
