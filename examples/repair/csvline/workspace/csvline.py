"""Lines of comma-separated values."""


def fields(line):
    """The fields of a line; commas within double quotes belong to a field."""
    return [field.strip('"') for field in line.split(",")]
