"""Look at a run in the browser: one HTML file, or a page served from this machine.

For turns, policies, sessions and rows that they cannot take, the functions raise what
`trajkit.linearize` and `trajkit.verify` raise.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.view.pages import Page as Page
    from trajkit.view.pages import page as page
else:
    __getattr__, __dir__ = lazy_names(__name__)
