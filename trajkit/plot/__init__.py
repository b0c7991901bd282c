"""Pictures of sessions and runs: SVG, or matplotlib figures (extra ``plot``).

For turns, policies, sessions and rows that they cannot take, the functions raise what
`trajkit.linearize` and `trajkit.verify` raise.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.plot.figures import swimlanes as swimlanes
    from trajkit.plot.figures import tokens as tokens
    from trajkit.plot.session_svg import forest as forest
    from trajkit.plot.timeline import trace as trace
else:
    __getattr__, __dir__ = lazy_names(__name__)
