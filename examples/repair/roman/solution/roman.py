"""Roman numerals."""

SIGNS = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def roman(number):
    """A number from 1 to 39 in Roman numerals."""
    written = ""
    for value, sign in SIGNS:
        written += sign * (number // value)
        number %= value
    return written
