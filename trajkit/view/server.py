"""Serve the page from this machine: the same page, with tables made when asked for."""

import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from trajkit.errors import TrajkitError
from trajkit.policies import Policy
from trajkit.tables.columns import take_session
from trajkit.view.document import document
from trajkit.view.tables import ViewTables, find_violations, packed

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_TEXT = "text/plain; charset=utf-8"


class LiveRun:
    """The answers of the server for one run, for the policies of each request.

    ``version`` returns a text that changes when the turns change, ``load`` the turns and
    the table of their sessions. ``policies`` are those of the first page, as texts for
    ``parse``; a page that follows asks now and then for the version. Further options are
    those of `ViewTables`. The attribute ``rows`` is verified under ``rows_policy``.
    """

    def __init__(
        self,
        title: str,
        version: Callable[[], str],
        load: Callable[[], tuple[pa.Table, pa.Table | None]],
        policies: Sequence[str],
        parse: Callable[[str], Policy],
        *,
        follow: bool = False,
        **options: Any,
    ) -> None:
        self.title, self._now, self._load = title, version, load
        self._policies, self._parse = tuple(policies), parse
        self.rows: pa.Table | None = None
        self.rows_policy: Policy | None = None
        self._follow, self._options = follow, options
        # one request computes at a time: tables are made lazily
        self._lock = Lock()
        self._version: str | None = None
        # for the last lists of policies
        self._of_run = lru_cache(8)(self._tables)

    def answer(self, name: str, query: dict[str, list[str]], n_runs: int = 1) -> bytes:
        """The bytes of one kind of data; KeyError for an unknown kind or session."""
        policies = tuple(query.get("policy", self._policies))
        with self._lock:
            if self._version is None or name == "index":
                self._refresh()
            match name:
                case "version":
                    return packed(self._now())
                case "index":
                    index = self._of_run(policies).index(self.title, n_runs)
                    live = {"texts": policies, "follow": self._follow}
                    return packed({**index, **live, "version": self._version})
                case "vocabulary":
                    return packed(self._of_run(policies).vocabulary())
                case "search":
                    tables = self._of_run(self._policies)
                    return packed(tables.search(query["word"][0]))
                case "session":
                    session_id = query["id"][0]
                    return self._tables(policies, session_id).chunk(session_id)
        raise KeyError(name)

    def _refresh(self) -> None:
        """Read the turns again if they have changed."""
        version = self._now()
        if version != self._version:
            self._turns, self._sessions = self._load()
            self._version = version
            self._of_run.cache_clear()
            if self.rows is not None:
                known = self.rows_policy, self._sessions
                found = find_violations(self.rows, self._turns, *known)
                self._options["violations"] = found

    def _tables(
        self, policies: tuple[str, ...], session_id: str | None = None
    ) -> ViewTables:
        """The tables of the run, or of one session."""
        turns = self._turns
        if session_id is not None:
            turns = take_session(turns, session_id)
        chosen = map(self._parse, policies)
        return ViewTables(turns, chosen, self._sessions, **self._options)


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
