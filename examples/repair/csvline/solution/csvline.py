"""Lines of comma-separated values."""


def fields(line):
    """The fields of a line; commas within double quotes belong to a field."""
    found, quoted = [""], False
    for sign in line:
        if sign == '"':
            quoted = not quoted
        elif sign == "," and not quoted:
            found.append("")
        else:
            found[-1] += sign
    return found
