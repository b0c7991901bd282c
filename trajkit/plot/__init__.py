"""Pictures and reports of runs: SVG and HTML, or matplotlib figures (extra ``plot``).

For turns, policies, sessions and rows that they cannot take, the functions raise what
`trajkit.linearize` and `trajkit.verify` raise.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.plot.figures import drift as drift
    from trajkit.plot.figures import policies as policies
    from trajkit.plot.figures import run as run
    from trajkit.plot.figures import swimlanes as swimlanes
    from trajkit.plot.figures import tokens as tokens
    from trajkit.plot.html_report import report as report
    from trajkit.plot.session_svg import forest as forest
    from trajkit.plot.timeline import trace as trace
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "figures": "drift policies run swimlanes tokens",
            "html_report": "report",
            "session_svg": "forest",
            "timeline": "trace",
        },
    )
