"""The page as one HTML file, and as an object that a notebook shows."""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from trajkit.analysis.tokenizer import Tokenizer
from trajkit.errors import ArgumentError
from trajkit.policies import PRESETS, Policy
from trajkit.policies import policy as named_policy
from trajkit.tables.canonical import TableLike, as_table
from trajkit.turns.records import as_turns
from trajkit.view.tables import ViewTables, find_violations, packed

_NAMES = "dom data policies drift forest tokens conversation compare run app"
SCRIPTS = ["vendor/flechette.min.js", *(f"{name}.js" for name in _NAMES.split())]
"""Files of ``static/`` in the order in which the page runs them."""

_STATIC = files("trajkit.view") / "static"

Chosen = str | Policy | Iterable[str | Policy] | None


@dataclass(frozen=True, slots=True)
class Page:
    """A page as HTML, which a notebook shows in a frame of this height in pixels."""

    html: str
    height: int = 720

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        # without allow-same-origin the page cannot reach the notebook
        return (
            f'<iframe sandbox="allow-scripts" width="100%" height="{self.height}" '
            f'style="border:0" srcdoc="{escape(self.html)}"></iframe>'
        )


def view(
    turns: TableLike, policies: Chosen = None, *, height: int = 720, **options: Any
) -> Page:
    """Show a run in a notebook: what policies train and lose, drift, calls and tokens.

    Parameters
    ----------
    turns, policies, **options
        As for `page`.
    height : int
        Of the frame, in pixels.

    Returns
    -------
    Page
        As the last value of a cell it is shown. ``save`` writes it as a file.
    """
    return Page(page(turns, policies, **options), height)


def page(
    turns: TableLike,
    policies: Chosen = None,
    *,
    sessions: TableLike | None = None,
    tokenizer: Tokenizer | None = None,
    text: bool = True,
    title: str = "trajkit",
    rows: TableLike | None = None,
    against: tuple[str, TableLike, TableLike | None] | None = None,
    paper: bool = False,
) -> str:
    """Make one HTML file of a run. It needs no server and no network.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policies : str, Policy, or iterable of them, optional
        Default: every preset.
    sessions : table, optional
        `trajkit.schema.SESSIONS`; a session with an error trains nothing.
    tokenizer : Tokenizer, optional
        The engine's tokenizer. With it the page has the text of tokens, and causes of
        drift by text. Without it: ids, and messages as text.
    text : bool
        False: the page has token ids and numbers, but no text of messages or tokens.
    title : str
        The name of the run.
    rows : table, optional
        Rows of trajkit or of another system. The page shows what `trajkit.verify` finds
        in them; of the first of ``policies``, if any are given.
    against : tuple, optional
        The title, turns and sessions (or None) of a second run to compare with.
    paper : bool
        Show the run and one session after the other, to be printed or saved as a PDF. The
        page says how many sessions of a larger run it leaves out.
    """
    if isinstance(policies, (str, Policy)):
        policies = [policies]
    chosen = [named_policy(one) for one in (PRESETS if policies is None else policies)]
    if not chosen:
        raise ArgumentError(
            "no policies: expected at least one, or None for all presets"
        )
    data: list[tuple[str, bytes]] = []
    runs = [(title, turns, sessions), *([] if against is None else [against])]
    for run, (name, own, known) in enumerate(runs):
        table = as_turns(as_table(own))
        facts = None if known is None else as_table(known)
        found = None
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
) -> str:
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
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
