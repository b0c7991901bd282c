"""Turns from the records of other systems.

A format is a table (`trajkit.importers.formats`): how a file is recognised, and at which
paths its records have what. `reader` decides for all formats which records become turns,
and what the report lists.
"""

from trajkit.importers.formats import FORMATS, TARGETS
from trajkit.importers.reader import import_file, import_turns

__all__ = ["FORMATS", "TARGETS", "import_file", "import_turns"]
