"""The commands of ``trajkit``, and of packages that add their own.

A command is a function: cyclopts makes its options and help from its signature and numpydoc
docstring. trajkit's own are in `COMMANDS`. More come from the entry-point group
``trajkit.commands``: an entry is such a function, under the command's name. A command
returns its exit code, or None for 0, and raises `trajkit.errors.ArgumentError` for options
that do not fit.
"""

import inspect
from importlib.metadata import entry_points, version

from cyclopts import App, CycloptsError, Parameter

from trajkit.errors import ArgumentError

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
    "check": ("compare:check", "Say whether a trainer's mask trains what was sampled."),
    "linearize": ("data:linearize", "Write the training rows of recorded turns."),
    "pack": ("data:pack", "Pack rows so that every shared prefix is there once."),
    "drift": ("compare:drift", "Count drift by region and cause."),
    "simulate": ("compare:simulate", "Compare what the policies keep, lose and cost."),
    "verify": ("compare:verify", "Check rows against the turns that they come from."),
    "plot": ("view:plot", "Draw a run or a session."),
    "export": ("data:export", "Write rows in a file that a trainer loads."),
    "show": ("show:show", "Print rows as text: what is trained, context, or lost."),
    "why": ("show:why", "Explain why each row begins where it does."),
    "tree": ("show:tree", "Draw the calls of each session as a tree."),
    "view": ("view:view", "Look at a run in the browser."),
    "policies": ("policies:policies", "List the policies, or the choices of one."),
    "compact": ("data:compact", "Write recorded turns in delta form."),
    "expand": ("data:expand", "Write turns with complete prompts."),
}
"""Where each of trajkit's own commands is, and the first line of its docstring."""


def run(words: list[str]) -> int:
    """Run a command line; returns the exit code. ArgumentError: it is wrong."""
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
        raise ArgumentError(str(error)) from None
    if inspect.ismethod(command):  # help or the version
        command(*bound.args, **bound.kwargs)
        return 0
    from trajkit.cli.options import call

    return call(command, bound)


def application(words: list[str]) -> App:
    """The command line. Only the command that ``words`` begin with has all its help."""
    app = App(
        name="trajkit",
        help="From recorded LLM agent calls to loss-masked training rows.",
        help_epilogue=_NOTES,
        version=lambda: f"trajkit {version('trajkit')}",
        default_parameter=Parameter(negative=(), show_default=_default),
    )
    for number, (name, (path, line)) in enumerate(COMMANDS.items()):
        # without it, the module is imported for the first line of its docstring
        help = {} if [name] == words else {"help": line}
        app.command(f"trajkit.cli.{path}", name=name, sort_key=number, **help)
    for entry in sorted(entry_points(group="trajkit.commands"), key=lambda e: e.name):
        app.command(entry.load(), name=entry.name, sort_key=len(COMMANDS))
    app.register_install_completion_command(help="Complete words in this shell.")
    return app


def _default(value: object) -> str | None:
    """A default as the help shows it; None: not at all."""
    return None if value in (None, "", ()) or value is False else str(value)
