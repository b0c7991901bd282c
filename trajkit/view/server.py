"""Serve the page from this machine: the same page, with tables made when asked for."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from trajkit.analysis.tokenizer import Tokenizer
from trajkit.errors import TrajkitError
from trajkit.policies import Policy
from trajkit.tables.columns import take_session
from trajkit.view.document import document
from trajkit.view.tables import ViewTables, Violations, find_violations, packed

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# tables of the run under this many lists of policies are kept
_N_KEPT = 8


class Source(Protocol):
    """Where the server's turns come from."""

    title: str

    def version(self) -> str:
        """A text that changes when the turns change."""

    def load(self) -> tuple[pa.Table, pa.Table | None]:
        """The turns, and the table of their sessions."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the tables of a served page have, as for `trajkit.view.page`."""

    # the policies of the first page, as texts such as "slime fork_threshold=256"
    policies: tuple[str, ...]
    parse: Callable[[str], Policy]
    tokenizer: Tokenizer | None = None
    text: bool = True
    pack_tokens: int | None = None
    # rows to verify, and their policy
    rows: pa.Table | None = None
    rows_policy: Policy | None = None
    # the page asks now and then whether the turns have changed
    follow: bool = False


class LiveRun:
    """The answers of the server for one run, for the policies of each request."""

    def __init__(self, source: Source, options: Options) -> None:
        self._source, self._options = source, options
        # one request computes at a time: tables are made lazily
        self._lock = Lock()
        self._version: str | None = None
        self._violations: Violations | None = None
        self._of_run = lru_cache(_N_KEPT)(self._tables)

    def answer(self, name: str, query: dict[str, list[str]], n_runs: int = 1) -> bytes:
        """The bytes of one kind of data; KeyError for an unknown kind or session."""
        options = self._options
        policies = tuple(query.get("policy", options.policies))
        with self._lock:
            if self._version is None or name == "index":
                self._refresh()
            match name:
                case "version":
                    return packed(self._source.version())
                case "index":
                    index = self._of_run(policies).index(self._source.title, n_runs)
                    live = {"texts": policies, "follow": options.follow}
                    return packed({**index, **live, "version": self._version})
                case "vocabulary":
                    return packed(self._of_run(policies).vocabulary())
                case "search":
                    tables = self._of_run(options.policies)
                    return packed(tables.search(query["word"][0]))
                case "session":
                    session_id = query["id"][0]
                    return self._tables(policies, session_id).chunk(session_id)
        raise KeyError(name)

    def _refresh(self) -> None:
        """Read the turns again if they have changed."""
        version, options = self._source.version(), self._options
        if version != self._version:
            self._turns, self._sessions = self._source.load()
            self._version = version
            self._of_run.cache_clear()
            if options.rows is not None:
                self._violations = find_violations(
                    options.rows, self._turns, options.rows_policy, self._sessions
                )

    def _tables(
        self, policies: tuple[str, ...], session_id: str | None = None
    ) -> ViewTables:
        """The tables of the run, or of one session."""
        turns, options = self._turns, self._options
        if session_id is not None:
            turns = take_session(turns, session_id)
        return ViewTables(
            turns,
            map(options.parse, policies),
            self._sessions,
            options.tokenizer,
            text=options.text,
            pack_tokens=options.pack_tokens,
            violations=self._violations,
        )


class ViewServer(ThreadingHTTPServer):
    """Answers requests for a run, and one to compare with, from 127.0.0.1. It only reads.

    Every path begins with a random token, so other users of the machine and other pages
    of the browser cannot guess it. A request with another Host is refused, so that a
    foreign name cannot be made to resolve to this machine (DNS rebinding).
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[LiveRun], title: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs = {str(number): run for number, run in enumerate(runs)}
        self.token = secrets.token_urlsafe(16)
        self.page = document(title, mode="live").encode()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    server_version = "trajkit"
    sys_version = ""

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._send(HTTPStatus.FORBIDDEN, "another host")
            return
        target = urlsplit(self.path)
        token, _, rest = target.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.NOT_FOUND, "not found")
        elif rest == "":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif rest.startswith("api/"):
            self._answer(rest.removeprefix("api/"), parse_qs(target.query))
        else:
            self._send(HTTPStatus.NOT_FOUND, "not found")

    def _answer(self, name: str, query: dict[str, list[str]]) -> None:
        try:
            run = self.server.runs[query.get("run", ["0"])[0]]
            content = run.answer(name, query, len(self.server.runs))
        except KeyError as error:
            self._send(HTTPStatus.NOT_FOUND, f"not found: {error.args[0]}")
        except (TrajkitError, OSError) as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error))
        else:
            self._send(HTTPStatus.OK, content, "application/octet-stream")

    def _send(
        self,
        status: HTTPStatus,
        content: bytes | str,
        kind: str = "text/plain; charset=utf-8",
    ) -> None:
        if isinstance(content, str):
            content = f"{content}\n".encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the path has the token."""
