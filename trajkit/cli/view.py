"""``trajkit view``: a run in the browser."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import trajkit as tk
from trajkit.cli.file_options import page_path, write_text
from trajkit.cli.options import (
    add_options,
    add_policies,
    checked_policy,
    chosen_policies,
    command,
    known_sessions,
    turn_pieces,
)
from trajkit.cli.policy_args import setting
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.errors import ArgumentError
from trajkit.io.tables import iter_tables, log_files, rows_plan
from trajkit.policies import PRESETS
from trajkit.schema import SESSIONS

if TYPE_CHECKING:
    from trajkit.view.selection import Selection

# browsers take long to open larger files
_LARGE_BYTES = 50_000_000
_SMALLER = "--session A,B, --sample N or --worst N"


def _add_to_view(parser: argparse.ArgumentParser) -> None:
    add_policies(parser, "a policy to show; may be repeated (default: all)")
    add_options(
        parser.add_mutually_exclusive_group(),
        """
--session A,B   only these sessions
--sample N      only N sessions, the same every time
--worst N       only the N sessions that lose most tokens under the first policy, drift
                most, or have the lowest logprobs
""",
        session={"type": lambda text: tuple(text.split(","))},
    )


@command(
    "view",
    """
look at a run in the browser

Show what each policy trains, loses and costs, drift in tokens, the calls of each session,
and their tokens. With -o the page is one HTML file that needs no server and no network.
Without it the page is served from 127.0.0.1 until Ctrl-C, and can show any policy.

source
-o --out FILE  write the page to an HTML file
--tokenizer PATH  the model's tokenizer.json, or its directory: show tokens as text, and the
                  causes of drift in text
--sessions FILE   a line per session: session_id, reward, group_id, error; Parquet, Arrow
                  IPC or JSONL by suffix. A session with an error is not trained (default:
                  the files of sessions in the directory IN)
--rows FILE       show what `trajkit verify` finds in these rows, under the first --policy
                  if there is one
--pack N          show the packs of N tokens that the rows of a session make
--against IN      a second run to compare with, read like IN
--print           show the run and one session after the other, to be printed or saved as
                  a PDF from the browser; with -o
--no-text         leave out the text of messages and tokens
--port PORT 0     of the server (default: any)
--follow          show new turns of a running gateway
--no-browser      print the address only
""",
    extend=_add_to_view,
    writes="page",
)
def run(arguments: argparse.Namespace) -> None:
    """Write the page or serve it."""
    from trajkit.view.document import page
    from trajkit.view.selection import Selection

    shown = {
        "tokenizer": chosen_tokenizer(arguments),
        "text": not arguments.no_text,
        "pack_tokens": arguments.pack,
    }
    policies = chosen_policies(arguments)
    first = (policies or list(PRESETS.values()))[0]
    selection = Selection(
        arguments.session, arguments.sample, arguments.worst, policy=first
    )
    source = _Files(arguments, arguments.source, arguments.sessions, selection)
    others = [
        _Files(arguments, [one], None, selection) for one in [arguments.against] if one
    ]
    rows = None
    if arguments.rows is not None:
        # as stored: rows of other systems have few columns, and verify judges them
        rows = pa.concat_tables(iter_tables(arguments.rows, plan=rows_plan))
    if arguments.out is None:
        if arguments.print:
            raise ArgumentError("--print makes a file: give it a name with -o")
        own = {"rows": rows, "rows_policy": first if policies else None}
        _serve(arguments, [source, *others], own, shown)
        return
    if arguments.follow:
        raise ArgumentError("--follow needs the server: leave out -o")
    path = page_path(Path(arguments.out))
    turns, sessions = source.load()
    against = next(((other.title, *other.load()) for other in others), None)
    about: Any = {"title": source.title, "rows": rows, "against": against, **shown}
    about["paper"] = arguments.print
    html = page(turns, policies, sessions=sessions, **about)
    write_text(path, html)
    size = path.stat().st_size
    n_sessions = len(set(turns["session_id"].to_pylist()))
    text = "the text of all messages; --no-text leaves it out"
    if arguments.no_text:
        text = "token ids and numbers, no text"
    sys.stdout.write(
        f"{n_sessions:,} of {source.n_sessions:,} sessions, {turns.num_rows:,} turns\n"
        f"contains {text}\nwritten to {arguments.out} ({size / 1e6:.1f} MB)\n"
    )
    if size > _LARGE_BYTES:
        sys.stdout.write(
            f"browsers open files above {_LARGE_BYTES / 1e6:.0f} MB slowly: choose "
            f"sessions with {_SMALLER}, or leave out -o to serve the page\n"
        )


def _serve(
    arguments: argparse.Namespace,
    sources: "list[_Files]",
    own: dict[str, Any],
    shown: dict[str, Any],
) -> None:
    """Serve the page; ``own`` are options of the first run only."""
    from trajkit.view.server import LiveRun, Options, ViewServer

    texts = tuple(PRESETS)
    if arguments.policy is not None:
        texts = tuple(
            " ".join([name, *(f"{choice}={value}" for choice, value in sets)])
            for name, sets in arguments.policy
        )
    options = Options(texts, _parsed, follow=arguments.follow, **shown)
    runs = [
        LiveRun(source, options if k else replace(options, **own))
        for k, source in enumerate(sources)
    ]
    try:
        with ViewServer(runs, sources[0].title, arguments.port) as server:
            sys.stdout.write(f"{server.url}\nCtrl-C ends\n")
            sys.stdout.flush()
            if not arguments.no_browser:
                import webbrowser

                webbrowser.open(server.url)
            server.serve_forever()
    except KeyboardInterrupt:
        pass


def _parsed(text: str) -> tk.Policy:
    """The policy of ``"NAME CHOICE=VALUE ..."``."""
    name, *sets = text.split() or [""]
    try:
        return checked_policy(name, [setting(one) for one in sets])
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(str(error)) from None


class _Files:
    """The turns of the command, and what is known of their sessions."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        source: list[str],
        sessions: str | None,
        selection: "Selection",
    ) -> None:
        self._arguments, self._source = arguments, source
        self._sessions, self._selection = sessions, selection
        self.title = ", ".join(Path(one).resolve().name for one in source)
        self.n_sessions = 0

    def version(self) -> str:
        """Sizes and times of the files of turns."""
        found = [path.stat() for path in log_files(self._source)[0]]
        return " ".join(f"{one.st_size}.{one.st_mtime_ns}" for one in found)

    def load(self) -> tuple[pa.Table, pa.Table | None]:
        """The turns of the chosen sessions, and the table of these sessions."""
        pieces = turn_pieces(
            self._source, self._arguments, empty=self._arguments.follow
        )
        turns, self.n_sessions = self._selection.of(
            batch for piece in pieces for batch in piece.to_batches()
        )
        prefix = self._arguments.session_prefix
        known = known_sessions(self._sessions, self._source, prefix)
        if known is None:
            return turns, None
        # sessions that have not ended have no line yet
        missing = dict.fromkeys(turns["session_id"].to_pylist())
        for name in known["session_id"].to_pylist():
            missing.pop(name, None)
        lines = pa.Table.from_pylist([{"session_id": one} for one in missing], SESSIONS)
        return turns, pa.concat_tables([known.select(SESSIONS.names), lines])
