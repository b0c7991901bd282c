"""The documentation site: ``sphinx-build -W docs build/site``."""

from docutils import nodes
from sphinx.addnodes import desc
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import _MockObject, mock
from sphinx.util.logging import getLogger

import trajkit.torch

project = "trajkit"
author = "The trajkit developers"
copyright = author

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "trajkit"
smartquotes = False

# Links to headings of other pages are checked.
myst_heading_anchors = 4

# `name` in a docstring is a link if it can be imported.
default_role = "autolink"
autosummary_generate = False
autodoc_default_options = {
    "members": True,
    "no-value": True,
}
# Docstrings state types, shapes and units.
autodoc_typehints = "none"
numpydoc_show_class_members = False

# trajkit.torch is documented without torch: its modules are imported here, once. Their
# annotations contain unions.
_MockObject.__or__ = lambda self, other: self
with mock(["torch", "transformers"]):
    for name in dir(trajkit.torch):
        getattr(trajkit.torch, name)


def check_api_page(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Warn of a page on the API without a documented name, as after a failed import."""
    if page.startswith("api/") and next(doctree.findall(desc), None) is None:
        getLogger(__name__).warning("no public name is documented", location=page)


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", check_api_page)
