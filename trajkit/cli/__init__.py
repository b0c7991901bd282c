"""The ``trajkit`` command, its exit codes, and one line per error.

A command is a function: its signature and numpydoc docstring make its options and help.
trajkit's own are in `COMMANDS`; more come from the entry-point group ``trajkit.commands``,
under the names of the entries. A command returns its exit code, or None for 0, and raises
`trajkit.errors.ArgumentError` for options that do not fit. Nothing large is imported before
the command is known, so that ``--help`` is fast.
"""

import inspect
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trajkit import errors

if TYPE_CHECKING:
    from cyclopts import App

DONE, BAD_DATA, BAD_USAGE, BAD_FILE = 0, 1, 2, 3
INTERRUPTED, CLOSED_PIPE = 130, 141

STANDARD_FILES: dict[str, str] = {}
"""What messages call the temporary files of standard input and output."""

_NOTES = """\
A file named - is standard input. --out - writes JSON lines (compact: an Arrow IPC stream)
to standard output, and messages to stderr. Exit codes: 0 done; 1 the data breaks a rule, or
verify or check found something; 2 wrong usage, or a missing optional package; 3 a file or
an address cannot be used; 130 interrupted; 141 the reader of the output went away.
"""

STANDARD = "/dev/stdin"
"""How a command sees a file that is called ``-``."""

COMMANDS = {
    "import": ("data:import_", "Write turns from the records of another system."),
    "check": ("data:check", "Say whether a trainer's mask trains what was sampled."),
    "linearize": ("data:linearize", "Write the training rows of recorded turns."),
    "pack": ("data:pack", "Pack rows so that every shared prefix is there once."),
    "drift": ("data:drift", "Count drift by region and cause."),
    "simulate": ("data:simulate", "Compare what the policies keep, lose and cost."),
    "verify": ("data:verify", "Check rows against the turns that they come from."),
    "plot": ("view:plot", "Draw a run or a session."),
    "export": ("data:export", "Write rows in a file that a trainer loads."),
    "show": ("view:show", "Print rows as text: what is trained, context, or lost."),
    "why": ("view:why", "Explain why each row begins where it does."),
    "tree": ("view:tree", "Draw the calls of each session as a tree."),
    "view": ("view:view", "Look at a run in the browser."),
    "policies": ("options:policies", "List the policies, or the choices of one."),
    "compact": ("data:compact", "Write recorded turns in delta form."),
    "expand": ("data:expand", "Write turns with complete prompts."),
}
"""Where each of trajkit's own commands is, and the first line of its docstring."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, or that of the process, and return its exit code."""
    STANDARD_FILES.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal's encoding may lack a character that a message shows
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", errors.TornLogWarning)
            warnings.simplefilter("always", errors.LeftOutWarning)
            warnings.showwarning = lambda text, *_, **__: say(f"warning: {text}")
            code = _run([*(sys.argv[1:] if argv is None else argv)])
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
    sys.stderr.write(f"trajkit: {visible(' '.join(shown(text).split()))}\n")


def visible(text: str) -> str:
    """The text with escapes for all characters that do not show or move others."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(text: str) -> str:
    """A message with options as they are typed, and without temporary files."""
    text = text.replace("nonfinite_logprobs='null'", "--nonfinite-logprobs null")
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


def _run(words: list[str]) -> int:
    """Run a command line; returns the exit code. ArgumentError: it is wrong."""
    from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words[:1] and words[0] in COMMANDS:
        # cyclopts takes a lone hyphen for an option
        words = [STANDARD if word == "-" else word for word in words]
    try:
        command, bound, _ = application(words[:1]).parse_args(
            words, print_error=False, exit_on_error=False
        )
    except CycloptsError as error:
        text = str(error)
        if isinstance(error, MissingArgumentError):
            name = error.argument.name if error.argument else "an argument"
            text = f"{words[0]} needs a value for {name}: see trajkit {words[0]} --help"
        elif isinstance(error, UnusedCliTokensError):
            odd = " ".join(error.unused_tokens or ())
            text = (
                f"{odd}: not expected there; several files stand side by side, before "
            )
            text += "the options"
        raise errors.ArgumentError(text) from None
    if inspect.ismethod(command):  # help or the version
        command(*bound.args, **bound.kwargs)
        return 0
    from trajkit.cli.options import call

    return call(command, bound)


def application(words: list[str]) -> "App":
    """The command line. Only the command that ``words`` begin with has all its help."""
    from cyclopts import App, Parameter

    app = App(
        name="trajkit",
        help="From recorded LLM agent calls to loss-masked training rows.",
        help_epilogue=_NOTES,
        version=lambda: f"trajkit {version('trajkit')}",
        default_parameter=Parameter(
            negative=(), show_default=lambda one: str(one) if one else None
        ),
    )
    for number, (name, (path, line)) in enumerate(COMMANDS.items()):
        # without it, the module is imported for the first line of its docstring
        help = {} if [name] == words else {"help": line}
        app.command(f"trajkit.cli.{path}", name=name, sort_key=number, **help)
    for entry in sorted(entry_points(group="trajkit.commands"), key=lambda e: e.name):
        app.command(entry.load(), name=entry.name, sort_key=len(COMMANDS))
    app.register_install_completion_command(help="Complete words in this shell.")
    return app
