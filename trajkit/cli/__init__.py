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

from trajkit import errors

DONE, BAD_DATA, BAD_USAGE, BAD_FILE = 0, 1, 2, 3
INTERRUPTED, CLOSED_PIPE = 130, 141

STANDARD_FILES: dict[str, str] = {}
"""What messages call the temporary files of standard input and output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, or that of the process, and return its exit code."""
    STANDARD_FILES.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal's encoding may lack a character that a message shows
            stream.reconfigure(errors="backslashreplace")
    try:
        from trajkit.cli.application import run

        with warnings.catch_warnings():
            warnings.simplefilter("always", errors.TornLogWarning)
            warnings.simplefilter("always", errors.LeftOutWarning)
            warnings.showwarning = lambda text, *_, **__: say(f"warning: {text}")
            code = run([*(sys.argv[1:] if argv is None else argv)])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        text, code = "interrupted", INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # rich ends the program where nobody reads its output any more
        if BrokenPipeError not in (type(error), type(error.__context__)):
            raise
        # the interpreter flushes stdout once more as it exits: that must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except ImportError as error:
        if (error.name or "trajkit").partition(".")[0].startswith("trajkit"):
            raise
        text, code = _missing(error), BAD_USAGE
    except (OSError, errors.FormatError) as error:
        text, code = str(error), BAD_FILE
        if isinstance(error, OSError) and None not in (error.filename, error.strerror):
            text = f"{error.filename}: {error.strerror}"
    except errors.ArgumentError as error:
        text, code = str(error), BAD_USAGE
    except errors.TrajkitError as error:
        text, code = str(error), BAD_DATA
    say(text)
    return code


def say(text: str) -> None:
    """Print a message as one line on stderr."""
    sys.stderr.write(f"trajkit: {' '.join(shown(text).split())}\n")


def shown(text: str) -> str:
    """A message that names standard input or output instead of temporary files."""
    for path in sorted(STANDARD_FILES, reverse=True):
        text = text.replace(path, STANDARD_FILES[path])
    return text


def _missing(error: ImportError) -> str:
    """Which package a command lacks, or has in a version that does not fit."""
    package = str(error.name).partition(".")[0]
    if package in ("cyclopts", "rich"):
        return f"the command line needs {package}: pip install 'trajkit[cli]'"
    if isinstance(error, ModuleNotFoundError) and find_spec(package) is None:
        return f"this needs {package}, which is not installed: pip install {package}"
    return f"the installed {package} does not fit: {error}. pip install -U {package}"
