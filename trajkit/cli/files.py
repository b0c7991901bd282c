"""The files of a command line: ``-`` as standard input and output, and no overwriting."""

import inspect
import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from trajkit.cli.application import STANDARD
from trajkit.errors import ArgumentError, TrajkitError
from trajkit.files.formats import format_of, replacing
from trajkit.files.guard import Input, check_outputs, inputs_of, turns_inputs
from trajkit.files.sources import is_address, local_files

_NAMES = {"input": "standard input", "output": "standard output"}

_folder: str | None = None


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


@dataclass(frozen=True, slots=True)
class _File:
    """A parameter with the name of a file, or several, and where its value is."""

    name: str
    mark: Reads | Writes
    values: dict[str, Any]

    @property
    def paths(self) -> list[str]:
        value = self.values[self.name]
        return value if isinstance(value, list) else [value]

    def replace(self, paths: list[str]) -> None:
        one = not isinstance(self.values[self.name], list)
        self.values[self.name] = paths[0] if one else paths

    def replace_dash(self, path: str) -> None:
        self.replace([path if one == STANDARD else one for one in self.paths])


def _files(command: Any, values: dict[str, Any]) -> Iterator[_File]:
    """The files among the parameters of a function, or the attributes of an object."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        if values.get(name) is None:
            continue
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Reads | Writes):
                yield _File(name, mark, values)
        if is_dataclass(values[name]):
            yield from _files(type(values[name]), vars(values[name]))


def call(command: Callable[..., int | None], bound: inspect.BoundArguments) -> int:
    """Run a command on its files; returns the exit code.

    ArgumentError if it would write over what it reads, see `check_outputs`.
    """
    files = [*_files(command, bound.arguments)]
    with _standard_files(files), _fetched_files(files):
        inputs = [
            one
            for file in files
            if isinstance(file.mark, Reads)
            for one in file.mark.inputs(file.paths)
        ]
        outputs = {
            f"--{file.name}": (file.paths[0], file.mark.kind)
            for file in files
            # export chooses a name in its folder, and checks that
            if isinstance(file.mark, Writes) and file.mark.kind != "export"
        }
        clobber = not bound.arguments.get("no_clobber")
        check_outputs(outputs, inputs, clobber=clobber)
        return command(*bound.args, **bound.kwargs) or 0


def shown(text: str) -> str:
    """A message that names standard input or output instead of temporary files."""
    if _folder is not None:
        for path in sorted(Path(_folder).iterdir()):
            text = text.replace(str(path), _NAMES[path.name.partition(".")[0]])
    return text


@contextmanager
def _standard_files(files: list[_File]) -> Iterator[None]:
    """Replace each ``-`` by a temporary file, and copy output to standard output.

    The first bytes of standard input determine its format. Messages for people go to
    stderr if standard output gets a table.
    """
    global _folder
    dashed = [
        file
        for file in files
        if STANDARD in file.paths and file.mark != Reads("tokenizer")
    ]
    outputs = [file for file in dashed if file.name == "out"]
    inputs = [file for file in dashed if isinstance(file.mark, Reads)]
    if sum(file.paths.count(STANDARD) for file in inputs) > 1:
        raise ArgumentError("standard input is given twice: only one file may be -")
    if not inputs and not outputs:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="trajkit-") as _folder:
        try:
            for file in inputs:
                file.replace_dash(_spooled(Path(_folder)))
            for file in outputs:
                assert isinstance(file.mark, Writes)
                file.replace_dash(str(Path(_folder, f"output.{file.mark.piped}")))
            with redirect_stdout(io.StringIO()) as printed:
                yield
            (sys.stderr if outputs else sys.stdout).write(shown(printed.getvalue()))
            for file in outputs:
                sys.stdout.flush()
                with open(file.paths[0], "rb") as content:
                    shutil.copyfileobj(content, sys.stdout.buffer)
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


@contextmanager
def _fetched_files(files: list[_File]) -> Iterator[None]:
    """Replace each address by a temporary copy of what is there."""
    with ExitStack() as stack:
        for file in files:
            # an import fetches its own, because it takes other files of a directory
            reads = isinstance(file.mark, Reads) and file.mark != Reads("records")
            if reads and any(map(is_address, file.paths)):
                copies = stack.enter_context(local_files(file.paths))
                file.replace([str(copy) for copy in copies])
        yield


def _spooled(folder: Path) -> str:
    """Standard input as a file with the suffix of its format."""
    path = folder / "input"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    with path.open("rb") as file:
        kind = "jsonl" if not path.stat().st_size else format_of(file)
    return str(path.rename(folder / f"input.{kind}"))


def page_path(path: str) -> Path:
    """The path of an HTML page; ArgumentError if its suffix is that of something else."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"--out {path}: a page is written as .html")
    return Path(path)


def write_text(path: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
