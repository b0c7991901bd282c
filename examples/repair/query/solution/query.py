"""The part of an address behind the question mark."""


def parse_query(text):
    """Values by name."""
    values = {}
    for pair in text.split("&"):
        name, _, value = pair.partition("=")
        if name:
            values[name] = value
    return values
