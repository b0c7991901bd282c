"""``trajkit view`` and ``trajkit plot``: a run in the browser, and pictures of it."""

import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from cyclopts import Parameter
from cyclopts.validators import Number

import trajkit as tk
from trajkit.cli import options as opt
from trajkit.cli import policies as pol
from trajkit.cli.screen import Progress
from trajkit.errors import ArgumentError
from trajkit.files.formats import replacing
from trajkit.files.tables import log_files, read_any_rows
from trajkit.schema import SESSIONS

# browsers take long to open larger files
_LARGE_BYTES = 50_000_000


def view(
    source: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.OUT, opt.Writes("page", piped="html")] = None,
    policy: pol.PoliciesOption = None,
    sessions: opt.SessionsFile = None,
    session: Annotated[str | None, Parameter(help="only these sessions: A,B")] = None,
    sample: opt.Count | None = None,
    tokenizer: opt.TokenizerPath = None,
    rows: Annotated[str | None, opt.Reads("rows")] = None,
    against: Annotated[str | None, opt.Reads("turns")] = None,
    print: bool = False,
    no_text: bool = False,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 0,
    follow: bool = False,
    no_browser: bool = False,
    reading: opt.Reading = opt.READING,
    no_clobber: opt.NoClobber = False,
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
    rows
        Show what `trajkit verify` finds in these rows, under the first --policy if there is
        one.
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
    from trajkit.view.pages import LiveRun, ViewServer, page

    texts = pol.many_policies(policy)
    policies = [*map(pol.policy_of, texts)]
    ids = None if session is None else session.split(",")
    choice: dict[str, Any] = {"ids": ids, "sample": sample}
    if None not in choice.values():
        raise ArgumentError("--session and --sample: only one of them is allowed")
    if out is not None:
        _check_suffix(out, "a page", "html", "htm")
        if follow:
            raise ArgumentError("--follow needs the server: leave out --out")
    elif print:
        raise ArgumentError("--print makes a file: give it a name with --out")
    runs = [Run(source, sessions, reading, choice, follow)]
    runs += [Run([one], None, reading, choice) for one in [against] if one]
    shown: dict[str, Any] = {"tokenizer": opt.chosen_tokenizer(tokenizer, source)}
    shown["text"] = not no_text
    # as stored: rows of other systems have few columns, and verify judges them
    table = None if rows is None else read_any_rows(rows)
    if out is None:
        more = texts, pol.policy_of, follow, shown
        live = [LiveRun(one.title, one.version, one.load, *more) for one in runs]
        live[0].rows, live[0].rows_policy = table, policies[0] if policy else None
        with suppress(KeyboardInterrupt), ViewServer(live, port) as server:
            opt.print_text(f"{server.url}\nCtrl-C ends")
            if not no_browser:
                webbrowser.open(server.url)
            server.serve_forever()
        return
    (turns, facts), *others = [run.load() for run in runs]
    with Progress("making the page"), replacing(Path(out)) as draft:
        html = page(
            turns,
            policies if policy else None,
            sessions=facts,
            title=runs[0].title,
            rows=table,
            against=(runs[1].title, *others[0]) if others else None,
            paper=print,
            **shown,
        )
        draft.write_text(html, encoding="utf-8")
    size = Path(out).stat().st_size
    text = "the text of all messages; --no-text leaves it out"
    if no_text:
        text = "token ids and numbers, no text"
    opt.print_text(
        f"{len(turns['session_id'].unique()):,} of {runs[0].n_sessions:,} sessions, "
        f"{turns.num_rows:,} turns\ncontains {text}\n"
        f"written to {out} ({size / 1e6:.1f} MB)"
    )
    if size > _LARGE_BYTES:
        opt.print_text(
            f"browsers open files above {_LARGE_BYTES / 1e6:.0f} MB slowly: choose "
            "sessions with --session A,B or --sample N, or leave out --out to serve it"
        )


def _check_suffix(out: str, what: str, *known: str) -> str:
    """The suffix of an output; ArgumentError if it is that of something else."""
    suffix = Path(out).suffix.removeprefix(".").lower()
    if suffix not in known:
        names = ", ".join(f".{one}" for one in known)
        raise ArgumentError(f"--out {out}: {what} is written as {names}")
    return suffix


@dataclass
class Run:
    """The turns of a run, and what is known of its sessions."""

    source: list[str]
    sessions: str | None
    reading: opt.Reading
    # of sessions, see `trajkit.view.tables.selected`
    choice: dict[str, Any]
    follow: bool = False
    n_sessions: int = 0

    def __post_init__(self) -> None:
        self.title = ", ".join(Path(one).resolve().name for one in self.source)

    def version(self) -> str:
        """Sizes and times of the files of turns."""
        found = [path.stat() for path in log_files(self.source)[0]]
        return " ".join(f"{one.st_size}.{one.st_mtime_ns}" for one in found)

    def load(self) -> tuple[pa.Table, pa.Table | None]:
        """The turns of the chosen sessions, and the table of these sessions."""
        from trajkit.view.tables import selected

        pieces = self.reading.pieces(self.source, empty=self.follow)
        batches = (batch for piece in pieces for batch in piece.to_batches())
        turns, self.n_sessions = selected(batches, **self.choice)
        prefix = self.reading.session_prefix
        known = opt.known_sessions(self.sessions, self.source, prefix)
        if known is None:
            return turns, None
        # sessions that have not ended have no line yet
        ended = {*known["session_id"].to_pylist()}
        names = turns["session_id"].unique().to_pylist()
        missing = [{"session_id": name} for name in names if name not in ended]
        lines = pa.Table.from_pylist(missing, SESSIONS)
        return turns, pa.concat_tables([known.select(SESSIONS.names), lines])


def plot(
    kind: Literal["swimlanes", "tokens"],
    source: opt.Source,
    /,
    *,
    out: Annotated[str, opt.OUT, opt.Writes("picture")],
    policy: pol.PolicyOption = None,
    session: opt.Session = None,
    reading: opt.Reading = opt.READING,
    no_clobber: opt.NoClobber = False,
) -> None:
    """Draw a run or a session.

    Needs matplotlib: pip install 'trajkit[plot]'.

    Parameters
    ----------
    kind
        swimlanes: generation, tools and queue of each session over time. tokens: each turn
        of a session, its prompt by role and its output by fate under the policy.
    out
        The picture; its suffix is the format: svg, png or pdf.
    session
        tokens: the session (default: the one with the most turns).
    """
    suffix = _check_suffix(out, "a picture", "svg", "png", "pdf")
    chosen, turns = pol.one_policy(policy), reading.turns(source)
    if kind == "tokens":
        figure = tk.plot.tokens(turns, chosen, session)
    else:
        figure = tk.plot.swimlanes(turns)
    from trajkit.plot.figures import save

    with Progress("drawing"), replacing(Path(out)) as draft:
        save(figure, draft, suffix)
