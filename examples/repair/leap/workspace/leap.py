"""Calendar rules."""


def is_leap(year):
    """Whether a year has 366 days."""
    return year % 4 == 0
