"""Lists in pieces."""


def chunks(values, size):
    """The values in lists of that size; the last one may be shorter."""
    return [values[i : i + size] for i in range(0, len(values), size)]
