"""Turns out of what other systems write: a module per format, one way in.

A format is a module with a ``NAME``, a ``detect`` that knows its files by their beginning,
and a ``read`` that yields what it finds (`trajkit.importers.findings.Format`). What of that
makes a turn, and what is told in the report instead, is decided in one place for all.
"""

from trajkit.importers.reader import FORMATS, import_turns
from trajkit.importers.stream import import_file

__all__ = ["FORMATS", "import_file", "import_turns"]
