"""Values between tags in a text that is not escaped."""

from trajkit_shim.parsers.form import skip


def until(
    text: str, at: int, closes: str, then: tuple[str, ...]
) -> tuple[str, int] | None:
    """The text from ``at`` up to a closing tag, and where what follows it starts.

    The tag may be part of the text: the first one counts that has, after white space,
    one of ``then`` behind it.
    """
    end = at - 1
    while (end := text.find(closes, end + 1)) >= 0:
        after = skip(text, end + len(closes))
        if text.startswith(then, after):
            return text[at:end], after
    return None
