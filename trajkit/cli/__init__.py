"""The ``trajkit`` command: parser, exit codes, one line per error.

Each of trajkit's own commands is a module of this package. More commands come from the
entry-point group ``trajkit.commands``: an entry is a function that takes what
``ArgumentParser.add_subparsers`` returned, adds a parser to it, and sets ``run`` on it, a
function from the parsed arguments to an exit code.

Nothing large is imported before the arguments are parsed, so that ``--help`` is as fast as
``import trajkit``.
"""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import NoReturn, cast

from trajkit._arguments import did_you_mean
from trajkit.cli.options import Command, Commands
from trajkit.cli.standard import check_files, shown, standard_files
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

EXIT_CODES = """\
- as a file name is standard input; -o - writes JSON lines (compact: an Arrow IPC stream)
to standard output, and messages to stderr.

exit codes:
  0    done
  1    the data breaks a rule: the line on stderr names session, turn, value and rule
       (verify: there are violations, listed on stdout)
  2    wrong usage: an unknown option, policy or choice, or a missing optional package
  3    a file or an address cannot be used, or a file has an unknown format
  130  interrupted
  141  the reader of the output went away
"""


MODULES = (
    *("imports", "check", "linearize", "pack", "drift", "simulate", "verify", "plot"),
    *("export", "head", "stats", "show", "why", "view", "policies", "compact"),
)
"""The modules of trajkit's own commands, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, or that of the process, and return its exit code.

    argparse ends the run with SystemExit after ``--help`` and after a usage error.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", TornLogWarning)
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = _warn
            with standard_files(arguments):
                check_files(arguments)
                code: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
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
    return code or DONE


class Parser(argparse.ArgumentParser):
    """A parser that suggests a name for a misspelled command, choice or option."""

    def error(self, message: str) -> NoReturn:
        known = [*self._option_string_actions]
        for action in self._actions:
            known += [str(choice) for choice in action.choices or ()]
        word = re.search(r"(?:choice: |arguments: )'?([^\s']+)", message)
        hint = did_you_mean(word[1], known) if word else ""
        super().error(f"{message}{hint}")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As the base class, but a command reports its unknown options itself."""
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return found, extra


class _Version(argparse.Action):
    """Print the installed version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"trajkit {version('trajkit')}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trajkit",
        description="From recorded LLM agent calls to loss-masked training rows.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version and exit"
    )

    parser.set_defaults(run=lambda _: parser.print_help(), writes_delta=False)
    commands = cast(
        "Commands", parser.add_subparsers(title="commands", metavar="COMMAND")
    )
    for name in MODULES:
        for command in vars(import_module(f"trajkit.cli.{name}")).values():
            if isinstance(command, Command):
                command.add(commands)
    for entry in sorted(entry_points(group="trajkit.commands"), key=lambda e: e.name):
        entry.load()(commands)
    return parser


def _fail(error: Exception | str, code: int) -> int:
    """Print a message as one line on stderr."""
    text = str(error)
    if isinstance(error, OSError) and None not in (error.filename, error.strerror):
        text = f"{error.filename}: {error.strerror}"
    sys.stderr.write(f"trajkit: {' '.join(shown(text).split())}\n")
    return code


def _missing(error: ImportError) -> str:
    """Which package a command lacks, or has in a version that does not fit."""
    package = str(error.name).partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and find_spec(package) is None:
        return f"this needs {package}, which is not installed: pip install {package}"
    return f"the installed {package} does not fit: {error}. pip install -U {package}"


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A replacement of `warnings.showwarning` that does not print source lines."""
    _fail(f"warning: {message}", DONE)
