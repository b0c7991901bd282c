"""Turns from the records of other systems: a module per format.

A format is a module with a ``NAME``, a ``detect`` that recognizes files by their beginning,
and a ``read`` that yields records (`trajkit.importers.findings.Format`). `reader` decides
for all formats which records become turns, and what the report lists.
"""

from trajkit.importers.reader import FORMATS, import_turns
from trajkit.importers.stream import import_file

__all__ = ["FORMATS", "import_file", "import_turns"]
