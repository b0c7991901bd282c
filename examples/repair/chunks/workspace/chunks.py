"""Lists in pieces."""


def chunks(values, size):
    """The values in lists of that size; the last one may be shorter."""
    whole = len(values) // size
    return [values[i * size : (i + 1) * size] for i in range(whole)]
