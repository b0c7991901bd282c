"""Reads values between tags in a text without escaping."""

from trajkit_shim.replies.parsers.form import skip


def until(
    text: str, offset: int, closes: str, then: tuple[str, ...]
) -> tuple[str, int] | None:
    """Return the text from ``offset`` to a closing tag, and the start of what follows.

    The value may contain the tag. The first one that is followed by white space and one
    of ``then`` closes it.
    """
    end = offset - 1
    while (end := text.find(closes, end + 1)) >= 0:
        after = skip(text, end + len(closes))
        if text.startswith(then, after):
            return text[offset:end], after
    return None
