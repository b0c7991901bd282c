"""Searching in sorted lists."""


def find(values, wanted):
    """The index of a value in a sorted list, or None."""
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return None
