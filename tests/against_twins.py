"""Links, rows and report of `trajkit` against those of the twins, session by session."""

import trajkit as tk
from tests.made_tables import by_session, linearized, turns_table
from tests.oracles.policies import twins_of


def difference(turns, policy, max_row_tokens=None, reward=1.0):
    """The first difference that is found, as text, or None."""
    table = turns_table(turns)
    rows, report = linearized(
        table, policy, max_row_tokens=max_row_tokens, reward=reward
    )
    links = tk.link(table, policy)
    found = {
        "links": by_session(links.to_pylist()),
        "rows": by_session(rows.to_pylist()),
        "report": by_session(report.to_pylist()),
    }
    for name, session in by_session(turns).items():
        twins = twins_of(session, policy, max_row_tokens, reward)
        for kind, expected in twins.items():
            got = found[kind].get(name, [])
            if len(got) != len(expected):
                return f"{name}: {len(got)} {kind}, the twin has {len(expected)}"
            for k, (one, other) in enumerate(zip(got, expected, strict=True)):
                for column, value in other.items():
                    if one[column] != value:
                        return (
                            f"{name}: {kind}[{k}][{column!r}] is {one[column]}, "
                            f"the twin's is {value}"
                        )
    return None
