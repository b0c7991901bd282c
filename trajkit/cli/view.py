"""``trajkit view``: a run in the browser."""

import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from cyclopts import Parameter

from trajkit.cli.files import Reads, Writes, page_path, write_text
from trajkit.cli.options import (
    OUT,
    Count,
    NoClobber,
    Port,
    Reading,
    SessionsFile,
    TokenizerPath,
    Turns,
    known_sessions,
    print_text,
)
from trajkit.cli.policies import PoliciesOption, many_policies, policy_of, text_of
from trajkit.cli.screen import working
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.errors import ArgumentError
from trajkit.files.tables import log_files, read_any_rows
from trajkit.policies import PRESETS
from trajkit.schema import SESSIONS

if TYPE_CHECKING:
    from trajkit.view.selection import Selection

# browsers take long to open larger files
_LARGE_BYTES = 50_000_000
_SMALLER = "--session A,B, --sample N or --worst N"


def view(
    source: Turns,
    /,
    *,
    out: Annotated[str | None, OUT, Writes("page", piped="html")] = None,
    policy: PoliciesOption = None,
    sessions: SessionsFile = None,
    session: Annotated[str | None, Parameter(help="only these sessions: A,B")] = None,
    sample: Count | None = None,
    worst: Count | None = None,
    tokenizer: TokenizerPath = None,
    rows: Annotated[str | None, Reads("rows")] = None,
    pack: Count | None = None,
    against: Annotated[str | None, Reads("turns")] = None,
    print: bool = False,
    no_text: bool = False,
    port: Port = 0,
    follow: bool = False,
    no_browser: bool = False,
    reading: Reading | None = None,
    no_clobber: NoClobber = False,
) -> None:
    """Look at a run in the browser.

    Show what each policy trains, loses and costs, drift in tokens, the calls of each
    session, and their tokens. With --out the page is one HTML file that needs no server and
    no network. Without it the page is served from 127.0.0.1 until Ctrl-C, and can show any
    policy. Rewards come from --sessions, else from the files of sessions in the directory.

    Parameters
    ----------
    out
        Write the page to an HTML file.
    sample
        Only this many sessions, the same every time.
    worst
        Only the N worst sessions: the worst by loss under the first policy, by drift and by
        logprob, one after the other.
    rows
        Show what `trajkit verify` finds in these rows, under the first --policy if there is
        one.
    pack
        Show the packs of this many tokens that the rows of a session make.
    against
        A second run to compare with.
    print
        Show the run and one session after the other, to be printed or saved as a PDF from
        the browser; with --out.
    no_text
        Leave out the text of messages and tokens.
    port
        Of the server (default: any).
    follow
        Show new turns of a running gateway.
    no_browser
        Print the address only.
    """
    from trajkit.view.document import page
    from trajkit.view.selection import Selection

    choices = {"--session": session, "--sample": sample, "--worst": worst}
    given = [name for name, value in choices.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(f"{given[1]}: not allowed with {given[0]}")
    shown: dict[str, Any] = {
        "tokenizer": chosen_tokenizer(tokenizer, source),
        "text": not no_text,
        "pack_tokens": pack,
    }
    policies = many_policies(policy)
    selection = Selection(
        None if session is None else tuple(session.split(",")),
        sample,
        worst,
        policy=(policies or list(PRESETS.values()))[0],
    )
    reading = reading or Reading()
    run = Run(source, sessions, reading, selection, follow=follow)
    others = [Run([one], None, reading, selection) for one in [against] if one]
    table = None
    if rows is not None:
        # as stored: rows of other systems have few columns, and verify judges them
        table = read_any_rows(rows)
    if out is None:
        if print:
            raise ArgumentError("--print makes a file: give it a name with --out")
        own = {"rows": table, "rows_policy": policies[0] if policies else None}
        options = {"policies": tuple(text_of(policy)), "follow": follow, **shown}
        _serve([run, *others], own, options, port, browser=not no_browser)
        return
    if follow:
        raise ArgumentError("--follow needs the server: leave out --out")
    path = page_path(out)
    turns, facts = run.load()
    other_run = next(((other.title, *other.load()) for other in others), None)
    with working("making the page"):
        html = page(
            turns,
            policies,
            sessions=facts,
            title=run.title,
            rows=table,
            against=other_run,
            paper=print,
            **shown,
        )
    write_text(path, html)
    size = path.stat().st_size
    n_sessions = len(set(turns["session_id"].to_pylist()))
    text = "token ids and numbers, no text"
    if not no_text:
        text = "the text of all messages; --no-text leaves it out"
    print_text(
        f"{n_sessions:,} of {run.n_sessions:,} sessions, {turns.num_rows:,} turns\n"
        f"contains {text}\nwritten to {out} ({size / 1e6:.1f} MB)"
    )
    if size > _LARGE_BYTES:
        print_text(
            f"browsers open files above {_LARGE_BYTES / 1e6:.0f} MB slowly: choose "
            f"sessions with {_SMALLER}, or leave out --out to serve the page"
        )


def _serve(
    sources: "list[Run]",
    own: dict[str, Any],
    options: dict[str, Any],
    port: int,
    *,
    browser: bool,
) -> None:
    """Serve the page; ``own`` are options of the first run only."""
    from trajkit.view.server import LiveRun, Options, ViewServer

    common = Options(parse=policy_of, **options)
    runs = [
        LiveRun(source, common if k else replace(common, **own))
        for k, source in enumerate(sources)
    ]
    try:
        with ViewServer(runs, sources[0].title, port) as server:
            print_text(f"{server.url}\nCtrl-C ends")
            if browser:
                webbrowser.open(server.url)
            server.serve_forever()
    except KeyboardInterrupt:
        pass


class Run:
    """The turns of a run, and what is known of its sessions."""

    def __init__(
        self,
        source: list[str],
        sessions: str | None,
        reading: Reading,
        selection: "Selection",
        *,
        follow: bool = False,
    ) -> None:
        self._source, self._sessions, self._follow = source, sessions, follow
        self._reading, self._selection = reading, selection
        self.title = ", ".join(Path(one).resolve().name for one in source)
        self.n_sessions = 0

    def version(self) -> str:
        """Sizes and times of the files of turns."""
        found = [path.stat() for path in log_files(self._source)[0]]
        return " ".join(f"{one.st_size}.{one.st_mtime_ns}" for one in found)

    def load(self) -> tuple[pa.Table, pa.Table | None]:
        """The turns of the chosen sessions, and the table of these sessions."""
        pieces = self._reading.pieces(self._source, empty=self._follow)
        turns, self.n_sessions = self._selection.of(
            batch for piece in pieces for batch in piece.to_batches()
        )
        known = known_sessions(
            self._sessions, self._source, self._reading.session_prefix
        )
        if known is None:
            return turns, None
        # sessions that have not ended have no line yet
        missing = dict.fromkeys(turns["session_id"].to_pylist())
        for name in known["session_id"].to_pylist():
            missing.pop(name, None)
        lines = pa.Table.from_pylist([{"session_id": one} for one in missing], SESSIONS)
        return turns, pa.concat_tables([known.select(SESSIONS.names), lines])
