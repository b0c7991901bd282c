"""Look at a run: show, why and tree in the terminal, view in the browser, plot."""

import webbrowser
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from cyclopts import Parameter
from cyclopts.validators import Number

import trajkit as tk
from trajkit.analysis.tokenizer import Codec, Ids
from trajkit.analysis.words import count
from trajkit.cli import options as opt
from trajkit.cli import visible
from trajkit.cli.screen import Fragment, Progress, Screen
from trajkit.errors import ArgumentError, FormatError, SchemaError
from trajkit.files.arrow import table_kind
from trajkit.files.formats import format_of, paths_in, replacing
from trajkit.files.jsonl import row_placed
from trajkit.files.pickles import ARRAYS, read_arrays
from trajkit.files.sources import paths_of
from trajkit.files.tables import iter_tables, log_files, read_any_rows
from trajkit.policies import PRESETS
from trajkit.schema import EMPTY_KINDS, SESSIONS
from trajkit.tables.canonical import canonical_rows
from trajkit.tables.columns import take_session, tuples
from trajkit.turns.sessions import Sessions
from trajkit.verification import row_forms


def show(
    source: opt.Source,
    /,
    *,
    policy: opt.PolicyOption = None,
    sessions: opt.SessionsFile = None,
    session: opt.Session = None,
    row: int | None = None,
    tokenizer: opt.TokenizerPath = None,
    context: opt.Count = 16,
    unfold: bool = False,
    reading: opt.Reading = opt.READING,
) -> None:
    """Print rows as text: what is trained, context, or lost.

    Print the tokens of rows, in order, with a label per range: trained, context, duplicate
    (another row trains it), untrainable, lost. Special tokens are in double brackets, a
    line break is an arrow, and half a character is its bytes. For turns, the rows are those
    of the policy, and lost tokens are shown too. Without a tokenizer, ids are shown.

    Parameters
    ----------
    row
        A single row per session.
    context
        Tokens shown at both ends of long context.
    unfold
        Show all context.
    """
    loaded = opt.chosen_tokenizer(tokenizer, source)
    codec = None if loaded is None else Codec(loaded)
    shown = _View(Screen(), codec, None if unfold else context)
    of_turns = {"policy": policy, "sessions": sessions}
    if (rows := rows_in(source, session, **of_turns)) is not None:
        shown.rows(rows, row)
        return
    chosen = opt.one_policy(policy)
    known: dict[str, Any] = {"sessions": opt.known_sessions(sessions)}
    for table in _each_session(reading.turns(source, session)):
        shown.outputs = dict(tuples(table, "turn_index", "output_ids"))
        lines = tk.analysis.output_spans(table, chosen, **known).to_pylist()
        shown.drift = {
            (one["turn_index"], one["output_start"]): one["drift_turn"] for one in lines
        }
        shown.rows(tk.linearize(table, chosen, **known), row)
        lost = [line for line in lines if line["row_index"] is None]
        if lost and row is None:
            head = f"session {visible(lost[0]['session_id'])}, in no row"
            shown.screen.print(head, "head")
            for line in lost:
                shown.lost(line)
            shown.screen.print()


def rows_in(source: list[str], session: str | None, **of_turns: Any) -> pa.Table | None:
    """The rows of one session or all, in files or a directory; None if they have turns.

    Those of a trainer get the names of ours. ``of_turns`` are options that do nothing with
    rows: one that is given is an error.
    """
    first = (paths_of(source) or [])[0]
    if first.is_dir():
        kinds = {table_kind(file, format_of(file)) for file in paths_in(first)}
        found = "rows" in kinds and not kinds & {"turns", None}
    elif not (found := first.suffix.lower() in ARRAYS):
        table = next(iter_tables(first, batch_rows=1), None)
        found = table is not None and row_forms.is_rows(table.column_names)
    if not found:
        return None
    for name in (one for one, given in of_turns.items() if given is not None):
        raise ArgumentError(f"--{name} is for turns, and {source[0]} has rows")
    rows = rows_of_trainer(*source, own=True)
    return rows if session is None else take_session(rows, session, "rows")


def rows_of_trainer(path: str, *more: str, own: bool = False) -> pa.Table:
    """The rows of files as `row_forms.PLAIN`, or with ``own`` those of trajkit as they are.

    Errors name the file, and the line of one.
    """
    try:
        if not more and Path(path).suffix.lower() in ARRAYS:
            return row_forms.plain_rows(read_arrays(Path(path)))
        rows = read_any_rows([path, *more])
        if own and "spans" in rows.column_names:
            return canonical_rows(rows)
        return row_forms.plain_rows(rows)
    except (FormatError, SchemaError) as error:
        text = str(error) if more else row_placed(path, str(error))
        raise type(error)(text) from None


def _each_session(turns: pa.Table) -> Iterator[pa.Table]:
    sessions = Sessions.of(turns)
    return (sessions.part(k, k + 1).table for k in range(len(sessions)))


@dataclass(slots=True)
class _View:
    """How rows are printed, and what turns say of them."""

    screen: Screen
    # None: ids are printed
    codec: Codec | None
    # tokens at both ends of long context. None: all
    context: int | None
    outputs: dict[int, list[int]] = field(default_factory=dict)
    # by turn and place in its output: the turn whose drift lost it
    drift: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def rows(self, rows: pa.Table, index: int | None) -> None:
        """Print rows, or one of them."""
        names = rows["row_index"].to_pylist()
        if index is not None and index not in names:
            raise ArgumentError(
                f"--row {index}: expected a row_index, 0 to {max(names, default=0)}"
            )
        for k, name in enumerate(names):
            if index in (None, name):
                self._row(rows.slice(k, 1).to_pylist()[0])

    def _row(self, row: dict[str, Any]) -> None:
        ids = np.array(row["input_ids"], np.int32)
        session, n = row.get("session_id"), sum(row.get("loss_mask") or [])
        place = "" if session is None else f"session {visible(str(session))}, "
        head = f"{place}row {row['row_index']}: {count(len(ids))}, {n:,} trained"
        self.screen.print(head, "head")
        first, parts = 0, [*_parts(row, len(ids))]
        if self.context is not None and row.get("parent_row") is not None:
            own = [start for kind, start, _, _ in parts if kind in ("trained", "lost")]
            first = min([row["shared_length"], *own])
        if first:
            words = f"... {count(first)} as in row {row['parent_row']} ..."
            self.screen.labelled("context", [(words, "fold")])
        for kind, start, stop, span in parts:
            if kind == "lost":
                self.lost(span)
            elif stop > first:
                self._range(kind, ids[max(start, first) : stop])
        self.screen.print()

    def lost(self, span: dict[str, Any]) -> None:
        """Print tokens that are lost, with the reason."""
        turn, start = span["turn_index"], span["output_start"]
        stop, cause = span["output_stop"], span["kind"].replace("_", " ")
        if (by := self.drift.get((turn, start))) is not None:
            cause += f" by turn {by}"
        words = f"({cause}: {count(stop - start)} of turn {turn})"
        text: list[Fragment] = [(words, "fold")]
        if self.outputs:
            ids = np.array(self.outputs[turn][start:stop], np.int32)
            text += [(" ", ""), *self._text(ids, "lost")]
        self.screen.labelled("lost", text)

    def _range(self, kind: str, ids: Ids) -> None:
        """Print tokens of a row; the middle of long context is folded."""
        n = self.context
        if n is None or kind in ("trained", "untrainable") or len(ids) <= 3 * n:
            self.screen.labelled(kind, self._text(ids, kind))
            return
        words = f"... {count(len(ids) - 2 * n)} of {kind} ..."
        self.screen.labelled(kind, self._text(ids[:n], kind))
        self.screen.labelled("", [(words, "fold")])
        self.screen.labelled("", self._text(ids[-n:], kind))

    def _text(self, ids: Ids, style: str) -> Iterator[Fragment]:
        """The text of tokens; special tokens are apart."""
        if self.codec is None:
            yield " ".join(map(str, ids.tolist())), style
            return
        special = self.codec.special(ids)
        cuts = (np.flatnonzero(special[1:] | special[:-1]) + 1).tolist()
        for start, run in zip([0, *cuts], np.split(ids, cuts), strict=True):
            text = self.codec.exact(run)
            if special[start : start + 1].any():
                yield f"⟦{visible(text)}⟧", "special"
            else:
                yield "↵\n".join(map(visible, text.split("\n"))), style


def _parts(
    row: dict[str, Any], n_tokens: int
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Kind, start, stop and span of each range of a row, context included."""
    spans = row.get("spans")
    if spans is None:
        edges = np.diff(np.array([False, *row["loss_mask"], False], np.int8))
        pairs = np.flatnonzero(edges).reshape(-1, 2).tolist()
        spans = [{"kind": "trained", "start": a, "stop": b} for a, b in pairs]
    at = 0
    for span in spans:
        if span["start"] > at:
            yield "context", at, span["start"], {}
        kind = "lost" if span["kind"] in EMPTY_KINDS else span["kind"]
        yield kind, span["start"], span["stop"], span
        at = span["stop"]
    if n_tokens > at:
        yield "context", at, n_tokens, {}


def marked(codec: Codec, ids: Ids, start: int, stop: int) -> str:
    """Tokens ``start:stop`` in brackets, with some before and after, one by one."""
    around = [ids[max(start - 3, 0) : start], ids[start:stop], ids[stop : stop + 3]]
    before, inside, after = (
        [visible(codec.exact(run[k : k + 1])) for k in range(len(run))]
        for run in around
    )
    return "·".join([*before, f"[{'|'.join(inside)}]", *after])


def why(
    source: opt.Source,
    /,
    *,
    policy: opt.PolicyOption = None,
    sessions: opt.SessionsFile = None,
    session: opt.Session = None,
    tokenizer: opt.TokenizerPath = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
) -> None:
    """Explain why each row begins where it does.

    Print a sentence for each row that a policy makes: the turn that opens it, where and why
    that turn leaves the path of its parent, and what the row trains and loses. Of rows,
    without their turns: where each leaves an earlier row.
    """
    of_turns = {"policy": policy, "sessions": sessions, "tokenizer": tokenizer}
    if (table := rows_in(source, session, **of_turns)) is not None:
        if "spans" in table.column_names:
            table = tk.read_rows(source)
            table = table if session is None else take_session(table, session, "rows")
        reasons = tk.analysis.why(table)
    else:
        loaded = opt.chosen_tokenizer(tokenizer, source)
        table = reading.turns(source, session)
        known = {"tokenizer": loaded, "sessions": opt.known_sessions(sessions)}
        with Progress("comparing prompts"):
            reasons = tk.analysis.why(table, opt.one_policy(policy), **known)
    lines: list[str] = []
    for name, own in groupby(reasons.to_pylist(), lambda line: line["session_id"]):
        lines += [] if name is None else [f"session {visible(name)}"]
        lines += [f"  {line['sentence']}" for line in own]
    opt.print_result({"rows": reasons.to_pylist()}, "\n".join(lines), json)


def tree(
    source: opt.Source,
    /,
    *,
    policy: opt.PolicyOption = None,
    session: opt.Session = None,
    reading: opt.Reading = opt.READING,
) -> None:
    """Draw the calls of each session as a tree.

    Shown are the call that each continues under a policy, and where its prompt drifts.
    """
    screen, chosen = Screen(), opt.one_policy(policy)
    for table in _each_session(reading.turns(source, session)):
        name = table["session_id"][0].as_py()
        screen.print(f"session {visible(name)}", "head")
        for line in tk.analysis.call_tree(table, name, chosen):
            screen.print(f"  {line}")


def view(
    source: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.OUT, opt.Writes("page", piped="html")] = None,
    policy: opt.PoliciesOption = None,
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

    With --out the page is one HTML file that needs no server and no network. Without it,
    the page is served from 127.0.0.1 until Ctrl-C, and can show any policy. Rewards come
    from --sessions, else from the files of sessions in the directory.

    Parameters
    ----------
    out
        Write the page to an HTML file.
    sample
        Only this many sessions, the same every time.
    rows
        Show what `trajkit verify` finds in these rows, under the first --policy.
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

    texts = policy or [*PRESETS]
    policies = [*map(opt.policy_of, texts)]
    if None not in (session, sample):
        raise ArgumentError("--session and --sample: only one of them is allowed")
    if out is not None:
        _check_suffix(out, "a page", "html", "htm")
        if follow:
            raise ArgumentError("--follow needs the server: leave out --out")
    elif print:
        raise ArgumentError("--print makes a file: give it a name with --out")
    choice = {"ids": session and session.split(","), "sample": sample}
    runs = [Run(source, sessions, reading, choice, follow)]
    runs += [Run([one], None, reading, choice) for one in [against] if one]
    loaded = opt.chosen_tokenizer(tokenizer, source)
    shown: dict[str, Any] = {"tokenizer": loaded, "text": not no_text}
    # as stored: rows of other systems have few columns, and verify judges them
    table = None if rows is None else read_any_rows(rows)
    if out is None:
        more = texts, opt.policy_of, follow, shown
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
    text = "the text of all messages; --no-text leaves it out"
    text = "token ids and numbers, no text" if no_text else text
    opt.print_text(
        f"{len(turns['session_id'].unique()):,} of {count(runs[0].n_sessions, 'session')}, "
        f"{count(turns.num_rows, 'turn')}\ncontains {text}\n"
        f"written to {out} ({Path(out).stat().st_size / 1e6:.1f} MB)"
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

    @property
    def title(self) -> str:
        return ", ".join(Path(one).resolve().name for one in self.source)

    def version(self) -> str:
        """Sizes and times of the files of turns."""
        found = [path.stat() for path in log_files(self.source)[0]]
        return " ".join(f"{one.st_size}.{one.st_mtime_ns}" for one in found)

    def load(self) -> tuple[pa.Table, pa.Table | None]:
        """The turns of the chosen sessions, and the table of these sessions."""
        from trajkit.view.tables import selected

        left_out = list[str]()
        pieces = self.reading.pieces(self.source, left_out, empty=self.follow)
        batches = (batch for piece in pieces for batch in piece.to_batches())
        turns, n_good = selected(batches, **self.choice)
        self.n_sessions = n_good + len(left_out)
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
    policy: opt.PolicyOption = None,
    session: str | None = None,
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
    if kind == "swimlanes" and (policy or session):
        raise ArgumentError("--policy and --session are for tokens, not for swimlanes")
    chosen, turns = opt.one_policy(policy), reading.turns(source)
    if kind == "tokens":
        figure = tk.plot.tokens(turns, chosen, session)
    else:
        figure = tk.plot.swimlanes(turns)
    from trajkit.plot.figures import save

    with Progress("drawing"), replacing(Path(out)) as draft:
        save(figure, draft, suffix)
