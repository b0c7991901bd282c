"""``trajkit plot``: pictures of a run."""

from pathlib import Path
from typing import Annotated, Literal

import trajkit as tk
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    NoClobber,
    Reading,
    Session,
    SessionsFile,
    Turns,
    known_sessions,
)
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import working
from trajkit.errors import ArgumentError
from trajkit.files.formats import replacing

_SUFFIXES = ("svg", "png", "pdf")


def plot(
    kind: Literal["swimlanes", "tokens"],
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("picture")],
    policy: PolicyOption = None,
    session: Session = None,
    sessions: SessionsFile = None,
    reading: Reading | None = None,
    no_clobber: NoClobber = False,
) -> None:
    """Draw a run or a session.

    Needs matplotlib: pip install 'trajkit[plot]'.

    Parameters
    ----------
    kind
        swimlanes: generation, tools and queue of each session over time. tokens: each turn
        of a session, its prompt by role and its output by fate under the policy.
    out
        The picture; its suffix is the format: svg, png or pdf.
    session
        tokens: the session (default: the one with the most turns).
    """
    path = Path(out)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in _SUFFIXES:
        raise ArgumentError(f"--out {out}: a picture is written as .svg, .png or .pdf")
    reading, chosen = reading or Reading(), one_policy(policy)
    turns = reading.turns(source)
    if kind == "tokens":
        figure = tk.plot.tokens(turns, chosen, session)
    else:
        facts = known_sessions(sessions, source, reading.session_prefix)
        figure = tk.plot.swimlanes(turns, facts)
    from trajkit.plot.figures import save

    with working("drawing"), replacing(path) as draft:
        save(figure, draft, suffix)
