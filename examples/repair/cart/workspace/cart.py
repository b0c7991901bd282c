"""What somebody wants to buy."""


class Cart:
    """Items in the order in which they were added."""

    def __init__(self, items=[]):
        self.items = items

    def add(self, item):
        """Add one more."""
        self.items.append(item)
