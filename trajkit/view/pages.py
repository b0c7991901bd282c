"""The page: one HTML file, or the same served from this machine, with tables made when
asked for.
"""

import base64
import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from trajkit.analysis.simulation import Policies, chosen_policies
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.errors import ArgumentError, TrajkitError
from trajkit.policies import Policy
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.columns import take_session
from trajkit.turns.records import as_turns
from trajkit.view.tables import ViewTables, find_violations, messages_of, packed

_NAMES = "dom data policies drift forest tokens conversation compare run app"
SCRIPTS = ["vendor/flechette.min.js", *(f"{name}.js" for name in _NAMES.split())]
"""Files of ``static/`` in the order in which the page runs them."""

_STATIC = files("trajkit.view") / "static"

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_TEXT = "text/plain; charset=utf-8"


class Page(str):
    """HTML, which a notebook shows in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # without allow-same-origin the page cannot reach the notebook
        return (
            '<iframe sandbox="allow-scripts" width="100%" height="720" style="border:0" '
            f'srcdoc="{escape(self)}"></iframe>'
        )


def page(
    turns: TableLike,
    policies: Policies = None,
    *,
    sessions: TableLike | None = None,
    tokenizer: Tokenizer | None = None,
    text: bool = True,
    title: str = "trajkit",
    rows: TableLike | None = None,
    against: tuple[str, TableLike, TableLike | None] | None = None,
    paper: bool = False,
) -> Page:
    """Make one HTML file of a run: what policies train and lose, drift, calls and tokens.

    Parameters
    ----------
    turns, policies, sessions
        As for `trajkit.simulate`, and so are the errors.
    tokenizer : Tokenizer, optional
        The engine's tokenizer: the page then has the text of tokens, and causes of drift
        by text. Without it: ids, and messages as text.
    text : bool
        False: no text of messages or tokens, only ids and numbers.
    title : str
        The name of the run.
    rows : table, optional
        Rows of trajkit or of another system. The page shows what `trajkit.verify` finds
        in them; of the first of ``policies``, if any are given.
    against : tuple, optional
        The title, turns and sessions (or None) of a second run to compare with.
    paper : bool
        Show the run and its first sessions one after the other, to be printed.

    Returns
    -------
    Page
        The text of the file, which needs no server and no network. As the last value of a
        cell, a notebook shows it.
    """
    chosen = chosen_policies(policies)
    if not chosen:
        raise ArgumentError("no policies: expected some, or None for all presets")
    data: list[tuple[str, bytes]] = []
    runs = [(title, turns, sessions), *([] if against is None else [against])]
    for run, (name, own, known) in enumerate(runs):
        table, found = as_turns(own), None
        facts = None if known is None else as_table(known)
        if rows is not None and run == 0:
            policy = None if policies is None else chosen[0]
            found = find_violations(as_table(rows), table, policy, facts)
        tables = ViewTables(
            table, chosen, facts, tokenizer, text=text, violations=found
        )
        data.append((f"index-{run}", packed(tables.index(name, len(runs)))))
        if (vocabulary := tables.vocabulary()) is not None:
            data.append((f"vocabulary-{run}", packed(vocabulary)))
        for number, session_id in enumerate(tables.session_ids):
            data.append((f"session-{run}-{number}", tables.chunk(session_id)))
    return document(title, data, "paper" if paper else "file")


def document(
    title: str,
    data: Iterable[tuple[str, bytes]] = (),
    mode: Literal["file", "live", "paper"] = "file",
) -> Page:
    """The HTML around the data.

    Every script and the style are allowed by their hash, so a script that a text brings
    into the page cannot run. Data is base64, which cannot end its element.
    """
    scripts = [(_STATIC / name).read_text("utf-8") for name in SCRIPTS]
    style = (_STATIC / "page.css").read_text("utf-8")
    connect = "'self'" if mode == "live" else "'none'"
    elements = (
        f'<script type="text/plain" id="data-{name}">'
        f"{base64.b64encode(content).decode()}</script>"
        for name, content in data
    )
    parts = {
        "mode": mode,
        # images: thumbnails of those that messages contain
        "policy": (
            f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
            f"style-src {_hash(style)}; img-src data:; connect-src {connect}; "
            "base-uri 'none'; form-action 'none'"
        ),
        "title": escape(title),
        "style": style,
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        "data": "\n".join(elements),
    }
    pieces = (_STATIC / "page.html").read_text("utf-8").split("@")
    found = (parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))
    return Page("".join(found))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@dataclass(eq=False)
class LiveRun:
    """The answers of the server for one run, for the policies of each request."""

    title: str
    # a text that changes when the turns change
    version: Callable[[], str]
    # the turns, and the table of their sessions
    load: Callable[[], tuple[pa.Table, pa.Table | None]]
    # those of the first page, as texts for ``parse``
    policies: Sequence[str]
    parse: Callable[[str], Policy]
    # the page asks now and then for the version
    follow: bool = False
    # further arguments of `ViewTables`
    options: dict[str, Any] = field(default_factory=dict)
    # rows, and the policy under which they are verified
    rows: pa.Table | None = None
    rows_policy: Policy | None = None

    def __post_init__(self) -> None:
        # one request computes at a time: tables are made lazily
        self._lock = Lock()
        self._loaded: str | None = None
        # for the last lists of policies
        self._of_run = lru_cache(8)(self._tables)

    def answer(self, name: str, query: dict[str, list[str]], n_runs: int = 1) -> bytes:
        """The bytes of one kind of data; KeyError for an unknown kind or session."""
        policies = tuple(query.get("policy", self.policies))
        with self._lock:
            if self._loaded is None or name == "index":
                self._refresh(self.version())
            match name:
                case "version":
                    return packed(self.version())
                case "index":
                    index = self._of_run(policies).index(self.title, n_runs)
                    live = {"texts": policies, "follow": self.follow}
                    return packed({**index, **live, "version": self._loaded})
                case "vocabulary":
                    return packed(self._of_run(policies).vocabulary())
                case "messages" | "session":
                    turns = take_session(self._turns, query["id"][0])
                    if name == "session":
                        return self._tables(policies, turns).chunk(query["id"][0])
                    text = self.options.get("text", True)
                    return packed(messages_of(turns, text)["messages"])
        raise KeyError(name)

    def _refresh(self, version: str) -> None:
        """Read the turns again if they have changed."""
        if version != self._loaded:
            self._turns, self._sessions = self.load()
            self._loaded = version
            self._of_run.cache_clear()
            if self.rows is not None:
                known = self.rows_policy, self._sessions
                found = find_violations(self.rows, self._turns, *known)
                self.options = {**self.options, "violations": found}

    def _tables(
        self, policies: Sequence[str], turns: pa.Table | None = None
    ) -> ViewTables:
        chosen = [*map(self.parse, policies)]
        known = self._turns if turns is None else turns
        return ViewTables(known, chosen, self._sessions, **self.options)


class ViewServer(ThreadingHTTPServer):
    """Answers requests for a run, and one to compare with, from 127.0.0.1. It only reads.

    Every path begins with a random token, so other users of the machine and other pages
    of the browser cannot guess it. A request with another Host is refused, so that a
    foreign name cannot be made to resolve to this machine (DNS rebinding).
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[LiveRun], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs = {str(number): run for number, run in enumerate(runs)}
        self.token = secrets.token_urlsafe(16)
        self.page = document(runs[0].title, mode="live").encode()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    server_version = "trajkit"
    sys_version = ""

    def do_GET(self) -> None:
        status, kind, content = self._answer()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self) -> tuple[HTTPStatus, str, bytes]:
        """The status, type and bytes of the answer."""
        port, runs = self.server.server_port, self.server.runs
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return HTTPStatus.FORBIDDEN, _TEXT, b"another host\n"
        target = urlsplit(self.path)
        token, _, rest = target.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return HTTPStatus.NOT_FOUND, _TEXT, b"not found\n"
        if not rest:
            return HTTPStatus.OK, "text/html; charset=utf-8", self.server.page
        query = parse_qs(target.query)
        folder, _, name = rest.partition("/")
        try:
            if folder != "api":
                raise KeyError(rest)
            content = runs[query.get("run", ["0"])[0]].answer(name, query, len(runs))
        except KeyError as error:
            return HTTPStatus.NOT_FOUND, _TEXT, f"not found: {error.args[0]}\n".encode()
        except (TrajkitError, OSError) as error:
            return HTTPStatus.BAD_REQUEST, _TEXT, f"{error}\n".encode()
        return HTTPStatus.OK, "application/octet-stream", content

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the path has the token."""
