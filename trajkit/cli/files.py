"""The files of a command: ``-``, addresses, and outputs that would replace an input."""

import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from trajkit.cli import STANDARD_FILES
from trajkit.cli.application import STANDARD
from trajkit.errors import ArgumentError
from trajkit.files.formats import format_of
from trajkit.files.guard import Input, check_outputs, inputs_of, turns_inputs
from trajkit.files.sources import is_address, local_files


@dataclass(frozen=True, slots=True)
class Reads:
    """Marks a parameter that names what is read: a kind of table, or "tokenizer"."""

    kind: str

    def inputs(self, paths: list[str]) -> list[Input]:
        """What is read at the paths."""
        if self.kind == "tokenizer":
            return inputs_of(paths, None, (".json", ".jinja", ".model"))
        if self.kind == "rows":
            return inputs_of(paths)
        if self.kind == "records":
            from trajkit.importers.containers import SUFFIXES

            return inputs_of(paths, None, SUFFIXES)
        return turns_inputs(paths)


@dataclass(frozen=True, slots=True)
class Writes:
    """Marks a parameter that names an output: the kind of table, or of file.

    On standard output it has the format ``piped``.
    """

    kind: str
    piped: str = "jsonl"


def call(command: Callable[..., int | None], bound: inspect.BoundArguments) -> int:
    """Run a command on its files; returns the exit code.

    ``-`` and addresses become temporary files. ArgumentError if an output would replace
    what is read, see `check_outputs`.
    """
    inputs: list[Input] = []
    outputs: dict[str, tuple[str, str]] = {}
    piped: Path | None = None
    clobber, stdout = True, sys.stdout
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for values, name, mark in [*_marked(command, bound.arguments)]:
            given = values[name]
            if name == "no_clobber":
                clobber = False
                continue
            paths = given if isinstance(given, list) else [given]
            if isinstance(mark, Writes):
                if name == "out" and paths == [STANDARD]:
                    piped = folder / f"output.{mark.piped}"
                    STANDARD_FILES[str(piped)] = "standard output"
                    paths = [str(piped)]
                    # a table goes there, and messages for people to stderr
                    stack.enter_context(redirect_stdout(sys.stderr))
                # export chooses a name in its folder, and checks that
                if mark.kind != "export":
                    outputs[f"--{name}"] = paths[0], mark.kind
            else:
                if mark.kind != "tokenizer" and STANDARD in paths:
                    own = _spooled(folder, paths)
                    paths = [own if one == STANDARD else one for one in paths]
                # an import fetches its own, because it takes other files of a directory
                if mark.kind != "records" and any(map(is_address, paths)):
                    copies = stack.enter_context(local_files(paths))
                    paths = [str(copy) for copy in copies]
                inputs += mark.inputs(paths)
            values[name] = paths if isinstance(given, list) else paths[0]
        check_outputs(outputs, inputs, clobber=clobber)
        code = command(*bound.args, **bound.kwargs)
        if piped is not None:
            stdout.flush()
            with piped.open("rb") as content:
                shutil.copyfileobj(content, stdout.buffer)
    return code or 0


def _marked(
    command: Any, values: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Files and no_clobber among a function's parameters, or an object's attributes."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        value = values.get(name)
        for mark in getattr(hint, "__metadata__", ()):
            known = isinstance(mark, Reads | Writes) or name == "no_clobber"
            if known and value not in (None, False):
                yield values, name, mark
        if is_dataclass(value):
            yield from _marked(type(value), vars(value))


def _spooled(folder: Path, paths: list[str]) -> str:
    """Standard input as a file; its first bytes determine the suffix."""
    if paths.count(STANDARD) > 1 or any(folder.glob("input*")):
        raise ArgumentError("standard input is given twice: only one file may be -")
    path = folder / "input"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    STANDARD_FILES[str(path)] = "standard input"
    with path.open("rb") as file:
        kind = "jsonl" if not path.stat().st_size else format_of(file)
    named = str(path.rename(folder / f"input.{kind}"))
    STANDARD_FILES[named] = "standard input"
    return named
