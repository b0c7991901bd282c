"""Summary statistics."""


def median(values):
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
