"""The part of an address behind the question mark."""


def parse_query(text):
    """Values by name."""
    values = {}
    for pair in text.split("&"):
        name, value = pair.split("=")
        values[name] = value
    return values
