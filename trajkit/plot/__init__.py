"""Pictures of sessions and runs as matplotlib figures (extra ``plot``).

For turns, policies and sessions that they cannot take, the functions raise what
`trajkit.linearize` raises, and `ArgumentError` without matplotlib.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.plot.figures import swimlanes as swimlanes
    from trajkit.plot.figures import tokens as tokens
else:
    __getattr__, __dir__ = lazy_names(__name__)
