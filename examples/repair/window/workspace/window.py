"""A running mean."""


class Window:
    """The values seen so far."""

    def __init__(self):
        self.values = []

    def add(self, value):
        """See one more value."""
        self.values.append(value)

    def mean_of_last(self, count):
        """The mean of the last values, or of all if there are fewer."""
        last = self.values[-count - 1 :]
        return sum(last) / len(last)
