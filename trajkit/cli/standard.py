"""The files of a command line: ``-`` as standard input and output, and no overwriting."""

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from trajkit.errors import ArgumentError, TrajkitError
from trajkit.io.formats import format_of
from trajkit.io.guard import Input, check_outputs, inputs_of, turns_inputs

DASH = "-"
_INPUTS = ("source", "rows", "turns", "sessions", "against")
# read, but never from standard input
_FOLDERS = ("tokenizer", "chat_template")
_OUTPUTS = ("report", "rejected", "findings")
_NAMES = {"input": "standard input", "output": "standard output"}

_folder: str | None = None


def shown(text: str) -> str:
    """A message that names standard input or output instead of temporary files."""
    if _folder is not None:
        for path in sorted(Path(_folder).iterdir()):
            text = text.replace(str(path), _NAMES[path.name.partition(".")[0]])
    return text


@contextmanager
def standard_files(arguments: argparse.Namespace) -> Iterator[None]:
    """Replace each ``-`` by a temporary file, and copy output to standard output.

    The first bytes of standard input determine its format. Standard output gets JSON
    lines, or an Arrow IPC stream from ``compact``; messages for people go to stderr then.
    """
    global _folder
    takes = [name for name in _INPUTS if DASH in _values(arguments, name)]
    gives = getattr(arguments, "out", None) == DASH
    if len(takes) > 1:
        raise ArgumentError("standard input is given twice: only one file may be -")
    if not takes and not gives:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="trajkit-") as _folder:
        try:
            for name in takes:
                path, given = _spooled(Path(_folder)), getattr(arguments, name)
                if isinstance(given, list):
                    path = [path if one == DASH else one for one in given]  # type: ignore[assignment]
                setattr(arguments, name, path)
            if gives:
                suffix = "arrows" if arguments.writes_delta else "jsonl"
                suffix = "html" if arguments.writes == "page" else suffix
                arguments.out = str(Path(_folder, f"output.{suffix}"))
            with redirect_stdout(io.StringIO()) as printed:
                yield
            (sys.stderr if gives else sys.stdout).write(shown(printed.getvalue()))
            if gives:
                sys.stdout.flush()
                with open(arguments.out, "rb") as file:
                    shutil.copyfileobj(file, sys.stdout.buffer)
        except (OSError, TrajkitError) as error:
            # here, because `shown` reads the folder
            error.args = tuple(
                shown(part) if isinstance(part, str) else part for part in error.args
            )
            if isinstance(error, OSError) and error.filename is not None:
                error.filename = shown(str(error.filename))
            raise
        finally:
            _folder = None


def check_files(arguments: argparse.Namespace) -> None:
    """Raise ArgumentError if a command would write over what it reads; see `check_outputs`.

    ``export`` names its file later, and checks it then.
    """
    kind = getattr(arguments, "writes", None)
    if kind is None or kind == "export":
        return
    outputs = {"--out": (arguments.out, kind)}
    outputs |= {
        f"--{name}": (getattr(arguments, name, None), name) for name in _OUTPUTS
    }
    given = {name: one for name, one in outputs.items() if one[0] is not None}
    check_outputs(given, inputs(arguments), clobber=not arguments.no_clobber)


def inputs(arguments: argparse.Namespace) -> list[Input]:
    """What the command reads."""
    from trajkit.importers.sources import SUFFIXES

    found = []
    for name in (*_INPUTS, *_FOLDERS):
        paths = [one for one in _values(arguments, name) if isinstance(one, str | Path)]
        if name in _FOLDERS:
            found += inputs_of(paths, None, (".json", ".jinja", ".model"))
        elif name == "rows":
            found += inputs_of(paths)
        elif arguments.writes == "turns" and hasattr(arguments, "format"):
            found += inputs_of(paths, None, SUFFIXES)
        else:
            found += turns_inputs(paths)
    return found


def _values(arguments: argparse.Namespace, name: str) -> list[object]:
    value = getattr(arguments, name, None)
    return value if isinstance(value, list) else [value]


def _spooled(folder: Path) -> str:
    """Standard input as a file with the suffix of its format."""
    path = folder / "input"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    with path.open("rb") as file:
        kind = "jsonl" if not path.stat().st_size else format_of(file)
    return str(path.rename(folder / f"input.{kind}"))
