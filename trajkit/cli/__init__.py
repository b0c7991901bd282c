"""The ``trajkit`` command: exit codes, and one line per error.

`trajkit.cli.application` says how commands are made, and how other packages add theirs.
Nothing large is imported before the command is known, so that ``--help`` is fast.
"""

import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from trajkit.errors import (
    ArgumentError,
    FormatError,
    LeftOutWarning,
    TornLogWarning,
    TrajkitError,
)

DONE = 0
BAD_DATA = 1
BAD_USAGE = 2
BAD_FILE = 3
INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, or that of the process, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal's encoding may lack a character that a message shows
            stream.reconfigure(errors="backslashreplace")
    try:
        from trajkit.cli.application import run

        with warnings.catch_warnings():
            warnings.simplefilter("always", TornLogWarning)
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = _warn
            code = run([*(sys.argv[1:] if argv is None else argv)])
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except SystemExit as error:
        # rich ends like this when nobody reads its output any more
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return CLOSED_PIPE
    except BrokenPipeError:
        # the interpreter flushes stdout once more as it exits: that must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except (OSError, FormatError) as error:
        return _fail(error, BAD_FILE)
    except ArgumentError as error:
        return _fail(error, BAD_USAGE)
    except ImportError as error:
        if (error.name or "trajkit").partition(".")[0].startswith("trajkit"):
            raise
        return _fail(_missing(error), BAD_USAGE)
    except TrajkitError as error:
        return _fail(error, BAD_DATA)
    return code


def _fail(error: Exception | str, code: int) -> int:
    """Print a message as one line on stderr."""
    text = str(error)
    if isinstance(error, OSError) and None not in (error.filename, error.strerror):
        text = f"{error.filename}: {error.strerror}"
    sys.stderr.write(f"trajkit: {' '.join(text.split())}\n")
    return code


def _missing(error: ImportError) -> str:
    """Which package a command lacks, or has in a version that does not fit."""
    package = str(error.name).partition(".")[0]
    if package in ("cyclopts", "rich"):
        return f"the command line needs {package}: pip install 'trajkit[cli]'"
    if isinstance(error, ModuleNotFoundError) and find_spec(package) is None:
        return f"this needs {package}, which is not installed: pip install {package}"
    return f"the installed {package} does not fit: {error}. pip install -U {package}"


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A replacement of `warnings.showwarning` that does not print source lines."""
    from trajkit.cli.files import shown

    _fail(f"warning: {shown(str(message))}", DONE)
