"""Every exception trajkit raises on purpose. Imports nothing from trajkit.

To add one: derive from `TrajkitError` and from the builtin that it refines, take the
message as the only argument (so that it pickles), and name the place, the value and the
rule in it: ``session 'a', turn 7: 12 logprobs for 14 output ids``.
"""


class TrajkitError(Exception):
    """Base class: catch this to catch anything trajkit raises on purpose."""


class SchemaError(TrajkitError, TypeError):
    """A table lacks a column, or a column has the wrong type."""


class InvalidTurnsError(TrajkitError, ValueError):
    """A value in a table breaks a rule of its schema."""


class MissingBodyError(InvalidTurnsError):
    """A policy compares messages by their bodies, and the table has one without."""


class LayoutError(TrajkitError, ValueError):
    """Buffers of a table do not fit together: offsets, lengths, indices, bitmaps, text."""


class ArgumentError(TrajkitError, ValueError):
    """An argument has a value that is not allowed, or excludes another argument."""


class PolicyError(ArgumentError):
    """A policy, or a choice within a policy, does not exist or excludes another."""


class FormatError(TrajkitError, ValueError):
    """A file's name or its content is of no format that can be read or written here."""


class ExportError(TrajkitError, ValueError):
    """Rows that a trainer's format cannot express, or would train wrongly."""


class UnsupportedModelError(TrajkitError, ValueError):
    """A model whose layers would mix the branches of a tree, or see wrong distances."""


class UnknownSessionError(TrajkitError, KeyError):
    """A session id that was never recorded, or was dropped."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LeftOutWarning(UserWarning):
    """A preset that can't be applied is not simulated, or a bad session is not shown."""


class NoSignalWarning(UserWarning):
    """Every advantage is 0, so a training step would change nothing."""


class LongRowsWarning(UserWarning):
    """Rows are longer than the length at which their trainer cuts them by default."""


class TornLogWarning(UserWarning):
    """A log ends within an entry, as a crash leaves it; the whole ones were read."""
