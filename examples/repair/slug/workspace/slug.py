"""Titles as parts of an address."""


def slugify(title):
    """The words of a title in lower case, with hyphens between them."""
    return "-".join(title.lower().split(" "))
