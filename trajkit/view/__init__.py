"""Look at a run in the browser: one HTML file, or a page served from this machine."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.view.document import Page as Page
    from trajkit.view.document import page as page
    from trajkit.view.document import view as view
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "document": "Page page view",
        },
    )
