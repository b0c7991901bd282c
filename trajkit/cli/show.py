"""``trajkit show``, ``why`` and ``tree``: rows and sessions in the terminal."""

import json as json_lines
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from cyclopts import Parameter

import trajkit as tk
from trajkit.analysis.tokenizer import Codec, Ids
from trajkit.analysis.words import count
from trajkit.cli.files import Reads
from trajkit.cli.options import (
    Count,
    Json,
    Reading,
    Session,
    TokenizerPath,
    Turns,
    print_json,
)
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import Fragment, Screen, lines_of, shortened, visible, working
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.errors import ArgumentError
from trajkit.files.arrow import table_kind
from trajkit.files.formats import format_of, paths_in
from trajkit.files.sources import Paths, paths_of
from trajkit.files.tables import iter_tables, read_any_rows
from trajkit.schema import EMPTY_KINDS
from trajkit.tables.take import take_session, tuples
from trajkit.turns.sessions import Sessions
from trajkit.verification import row_forms

TurnsOrRows = Annotated[
    list[str],
    Parameter(
        help="turns or rows: Parquet, Arrow IPC or JSON by suffix, or directories; - is "
        "standard input"
    ),
    Reads("turns"),
]

# characters of a message where there is no tokenizer
_MAX_MESSAGE = 160


def show(
    source: TurnsOrRows,
    /,
    *,
    policy: PolicyOption = None,
    session: Session = None,
    row: int | None = None,
    tokenizer: TokenizerPath = None,
    context: Count = 16,
    unfold: bool = False,
    no_color: bool = False,
    reading: Reading | None = None,
) -> None:
    """Print rows as text: what is trained, context, or lost.

    Print the tokens of rows, in order, with a label per range: trained, context, duplicate
    (another row trains it), untrainable, lost. Special tokens are in double brackets, a
    line break is shown as an arrow, and half a character as its bytes. For turns, the rows
    are those of the policy, and lost tokens are shown too. Without a tokenizer, ids and
    messages are shown.

    Parameters
    ----------
    row
        A single row per session.
    context
        Tokens shown at both ends of long context.
    unfold
        Show all context and all messages.
    no_color
        No colours.
    """
    loaded = chosen_tokenizer(tokenizer, source)
    codec = None if loaded is None else Codec(loaded)
    view = _View(Screen(colour=not no_color), codec, None if unfold else context)
    if is_rows(source):
        rows = read_any_rows(source)
        if not {"input_ids", "loss_mask"} <= {*rows.column_names}:
            rows = row_forms.plain_rows(rows).drop_columns("padding")
        for one in _chosen_rows(of_session(rows, session, "rows"), row):
            view.row(one, {})
        return
    chosen = one_policy(policy)
    turns = of_session((reading or Reading()).turns(source), session, "turns")
    for table in each_session(turns):
        ids = tuples(table, "turn_index", "output_ids")
        outputs = {turn: np.array(output, np.int32) for turn, output in ids}
        messages = {} if codec else _messages(table)
        lines = tk.analysis.output_spans(table, chosen).to_pylist()
        drift = {(x["turn_index"], x["output_start"]): x["drift_turn"] for x in lines}
        for one in _chosen_rows(tk.linearize(table, chosen), row):
            for span in one["spans"]:
                key = span["turn_index"], span["output_start"]
                span["drift_turn"] = drift.get(key)
            view.row(one, outputs, messages.get(one["last_turn"], []))
        if row is None:
            view.lost([line for line in lines if line["row_index"] is None], outputs)


def is_rows(source: Paths) -> bool:
    """Whether the first file has rows and not turns."""
    first = (paths_of(source) or [])[0]
    files = paths_in(first)
    if first.is_dir():
        kinds = {table_kind(file, format_of(file)) for file in files}
        return "rows" in kinds and not kinds & {"turns", None}
    table = next(iter_tables(files[0], batch_rows=1), None)
    names = [] if table is None else table.column_names
    return row_forms.is_rows(names)


def of_session(table: pa.Table, session: str | None, what: str) -> pa.Table:
    """The lines of one session, as `take_session`; of all without a name."""
    return table if session is None else take_session(table, session, what)


def each_session(turns: pa.Table) -> Iterator[pa.Table]:
    """The turns of each session."""
    located = Sessions.of(turns)
    for k in range(len(located)):
        yield located.part(k, k + 1).table


def _chosen_rows(rows: pa.Table, index: int | None) -> Iterator[dict[str, Any]]:
    """The rows as dicts, one at a time."""
    known = "row_index" in rows.column_names
    found = False
    for k in range(rows.num_rows):
        at = rows["row_index"][k].as_py() if known else k
        if index is None or at == index:
            found = True
            (row,) = rows.slice(k, 1).to_pylist()
            yield {"row_index": at, **row}
    if index is not None and not found:
        raise ArgumentError(
            f"--row {index}: expected an index of one of the {rows.num_rows} rows"
        )


def _messages(turns: pa.Table) -> dict[int, list[tuple[str, str]]]:
    """Role and text of the messages of each turn, request and reply, of one session."""
    bodies: dict[bytes, str] = {}
    found: dict[int, list[tuple[str, str]]] = {}
    table = tk.expand(turns).select(["turn_index", "messages", "response"])
    for turn in table.to_pylist():
        found[turn["turn_index"]] = lines = []
        for message in filter(None, [*(turn["messages"] or []), turn["response"]]):
            if message["body"] is not None:
                bodies[message["key"]] = message["body"]
            lines.append((message["role"], _content(bodies.get(message["key"], ""))))
    return found


def _content(body: str) -> str:
    """The text of a message; its JSON if it has more than text."""
    try:
        message = json_lines.loads(body)
    except ValueError:
        return body
    extra = set(message) - {"role", "content"}
    content = message.get("content")
    return content if isinstance(content, str) and not extra else body


@dataclass(frozen=True, slots=True)
class _View:
    """How rows are printed."""

    screen: Screen
    # None: ids are printed
    codec: Codec | None
    # tokens at both ends of long context. None: all
    context: int | None

    def row(
        self,
        row: dict[str, Any],
        outputs: dict[int, Ids],
        messages: list[tuple[str, str]] | None = None,
    ) -> None:
        """Print a row. ``outputs`` of turns are for tokens that it lost."""
        ids = np.array(row["input_ids"], np.int32)
        mask = row.get("loss_mask") or []
        session = row.get("session_id")
        place = "" if session is None else f"session {visible(str(session))}, "
        self.screen.print(
            f"{place}row {row['row_index']}: {len(ids):,} tokens, {sum(mask):,} trained",
            "head",
        )
        for role, text in messages or []:
            most = len(text) if self.context is None else _MAX_MESSAGE
            self.screen.labelled(visible(role), [(shortened(text, most), "")])
        first = 0
        parts = list(_parts(row, len(ids)))
        if self.context is not None and row.get("parent_row") is not None:
            own = [start for kind, start, _, _ in parts if kind in ("trained", "lost")]
            first = min([row["shared_length"], *own])
        if first:
            words = f"... {count(first)} as in row {row['parent_row']} ..."
            self.screen.labelled("context", [(words, "fold")])
        for kind, start, stop, span in parts:
            if kind == "lost":
                self._lost(span, outputs)
            elif stop > first:
                self._range(kind, ids[max(start, first) : stop])
        self.screen.print()

    def lost(self, lines: list[dict[str, Any]], outputs: dict[int, Ids]) -> None:
        """Print the sampled tokens that are in no row."""
        if not lines:
            return
        session = visible(lines[0]["session_id"])
        self.screen.print(f"session {session}, in no row", "head")
        for line in lines:
            self._lost(line, outputs)
        self.screen.print()

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

    def _lost(self, span: dict[str, Any], outputs: dict[int, Ids]) -> None:
        """Print tokens that are lost, with the reason."""
        names = ("output_start", "output_stop", "turn_index")
        start, stop, turn = (span[name] for name in names)
        words = f"({span['kind'].replace('_', ' ')}"
        if span.get("drift_turn") is not None:
            words += f" by turn {span['drift_turn']}"
        words += f": {count(stop - start)} of turn {turn})"
        text: list[Fragment] = [(words, "fold")]
        if outputs:
            text += [(" ", ""), *self._text(outputs[turn][start:stop], "lost")]
        self.screen.labelled("lost", text)

    def _text(self, ids: Ids, style: str) -> Iterator[Fragment]:
        """The text of tokens; special tokens are apart."""
        if self.codec is None:
            yield " ".join(map(str, ids.tolist())), style
            return
        special = self.codec.special(ids)
        cuts = np.flatnonzero(special | np.append(True, special[:-1])[: len(ids)])
        for run, first in zip(np.split(ids, cuts[1:]), cuts, strict=False):
            text = self.codec.exact(run)
            if special[first]:
                yield f"⟦{visible(text)}⟧", "special"
            else:
                yield lines_of(text), style


def _parts(
    row: dict[str, Any], n_tokens: int
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Kind, start, stop and span of each range of a row, context included."""
    spans = row.get("spans")
    if spans is None:
        edges = np.diff(np.array([False, *row["loss_mask"], False], np.int8))
        spans = [
            {"kind": "trained", "start": start, "stop": stop}
            for start, stop in np.flatnonzero(edges).reshape(-1, 2).tolist()
        ]
    at = 0
    for span in spans:
        if span["start"] > at:
            yield "context", at, span["start"], {}
        kind = "lost" if span["kind"] in EMPTY_KINDS else span["kind"]
        yield kind, span["start"], span["stop"], span
        at = span["stop"]
    if at < n_tokens:
        yield "context", at, n_tokens, {}


def why(
    source: TurnsOrRows,
    /,
    *,
    policy: PolicyOption = None,
    session: Session = None,
    tokenizer: TokenizerPath = None,
    reading: Reading | None = None,
    json: Json = False,
) -> None:
    """Explain why each row begins where it does.

    Print a sentence for each row that a policy makes: the turn that opens it, where and why
    that turn leaves the path of its parent, and the tokens that the row trains and loses.
    With a tokenizer, causes of drift are named by text. Of rows, without their turns: where
    each leaves an earlier row.
    """
    screen = Screen()
    if is_rows(source):
        table = read_any_rows(source)
        if "spans" in table.column_names:
            table = tk.read_rows(source)
        reasons = tk.analysis.why(of_session(table, session, "rows"))
    else:
        loaded = chosen_tokenizer(tokenizer, source)
        turns = (reading or Reading()).turns(source)
        table = of_session(turns, session, "turns")
        with working("comparing prompts"):
            reasons = tk.analysis.why(table, one_policy(policy), tokenizer=loaded)
    if json:
        print_json({"rows": reasons.to_pylist()})
        return
    last = None
    for line in reasons.select(["session_id", "sentence"]).to_pylist():
        if line["session_id"] != last:
            last = line["session_id"]
            screen.print(f"session {visible(last)}", "head")
        screen.print(f"  {line['sentence']}")


def tree(
    source: Turns,
    /,
    *,
    policy: PolicyOption = None,
    session: Session = None,
    reading: Reading | None = None,
) -> None:
    """Draw the calls of each session as a tree.

    Shown are which call each continues under a policy, its label if it opens a branch, and
    where its prompt drifts.
    """
    screen, chosen = Screen(), one_policy(policy)
    turns = of_session((reading or Reading()).turns(source), session, "turns")
    for table in each_session(turns):
        name = table["session_id"][0].as_py()
        screen.print(f"session {visible(name)}", "head")
        for line in tk.analysis.call_tree(table, name, chosen):
            screen.print(f"  {line}")
