"""Look in the terminal: show, why and tree."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.tokenizer import Codec, Ids
from trajkit.analysis.words import count
from trajkit.cli import options as opt
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import Fragment, Progress, Screen, visible
from trajkit.errors import ArgumentError
from trajkit.files.arrow import table_kind
from trajkit.files.formats import format_of, paths_in
from trajkit.files.sources import Paths, paths_of
from trajkit.files.tables import iter_tables, read_any_rows
from trajkit.schema import EMPTY_KINDS
from trajkit.tables.columns import take_session, tuples
from trajkit.turns.sessions import Sessions
from trajkit.verification import row_forms

# tokens of an example of drift: at both ends of the span, and around it
_MAX_TOKENS, _AROUND = 12, 3


def show(
    source: opt.Source,
    /,
    *,
    policy: PolicyOption = None,
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
    line break is shown as an arrow, and half a character as its bytes. For turns, the rows
    are those of the policy, and lost tokens are shown too. Without a tokenizer, ids are
    shown. The environment variable NO_COLOR turns colours off.

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
    view = _View(Screen(), codec, None if unfold else context)
    if is_rows(source):
        rows = read_any_rows(source)
        if not {"input_ids", "loss_mask"} <= {*rows.column_names}:
            rows = row_forms.plain_rows(rows).drop_columns("padding")
        if session is not None:
            rows = take_session(rows, session, "rows")
        view.rows(rows, row)
        return
    chosen = one_policy(policy)
    for table in _each_session(reading.turns(source, session)):
        view.outputs = dict(tuples(table, "turn_index", "output_ids"))
        lines = tk.analysis.output_spans(table, chosen).to_pylist()
        view.drift = {
            (one["turn_index"], one["output_start"]): one["drift_turn"] for one in lines
        }
        view.rows(tk.linearize(table, chosen), row)
        lost = [line for line in lines if line["row_index"] is None]
        if lost and row is None:
            head = f"session {visible(lost[0]['session_id'])}, in no row"
            view.screen.print(head, "head")
            for line in lost:
                view.lost(line)
            view.screen.print()


def is_rows(source: Paths) -> bool:
    """Whether the first file has rows and not turns."""
    first = (paths_of(source) or [])[0]
    if first.is_dir():
        kinds = {table_kind(file, format_of(file)) for file in paths_in(first)}
        return "rows" in kinds and not kinds & {"turns", None}
    table = next(iter_tables(first, batch_rows=1), None)
    return table is not None and row_forms.is_rows(table.column_names)


def _each_session(turns: pa.Table) -> Iterator[pa.Table]:
    located = Sessions.of(turns)
    return (located.part(k, k + 1).table for k in range(len(located)))


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
        if "row_index" not in rows.column_names:
            rows = rows.append_column("row_index", pa.array(range(rows.num_rows)))
        names = rows["row_index"].to_pylist()
        if index is not None and index not in names:
            raise ArgumentError(
                f"--row {index}: expected an index of one of the {rows.num_rows} rows"
            )
        for k, name in enumerate(names):
            if index in (None, name):
                self._row(rows.slice(k, 1).to_pylist()[0])

    def _row(self, row: dict[str, Any]) -> None:
        ids = np.array(row["input_ids"], np.int32)
        session, n = row.get("session_id"), sum(row.get("loss_mask") or [])
        place = "" if session is None else f"session {visible(str(session))}, "
        head = f"{place}row {row['row_index']}: {len(ids):,} tokens, {n:,} trained"
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

    def texts(ids: Ids) -> list[str]:
        return [visible(codec.exact(ids[k : k + 1])) for k in range(len(ids))]

    inside = ids[start:stop]
    shown = texts(inside[:_MAX_TOKENS])
    if len(inside) > 2 * _MAX_TOKENS:
        shown.append(f"... {len(inside) - 2 * _MAX_TOKENS:,} tokens ...")
    shown += texts(inside[_MAX_TOKENS:][-_MAX_TOKENS:])
    before = texts(ids[max(start - _AROUND, 0) : start])
    after = texts(ids[stop : stop + _AROUND])
    return "·".join([*before, f"[{'|'.join(shown)}]", *after])


def why(
    source: opt.Source,
    /,
    *,
    policy: PolicyOption = None,
    session: opt.Session = None,
    tokenizer: opt.TokenizerPath = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
) -> None:
    """Explain why each row begins where it does.

    Print a sentence for each row that a policy makes: the turn that opens it, where and why
    that turn leaves the path of its parent, and the tokens that the row trains and loses.
    With a tokenizer, causes of drift are named by text. Of rows, without their turns: where
    each leaves an earlier row.
    """
    if is_rows(source):
        table = read_any_rows(source)
        if "spans" in table.column_names:
            table = tk.read_rows(source)
        if session is not None:
            table = take_session(table, session, "rows")
        reasons = tk.analysis.why(table)
    else:
        loaded = opt.chosen_tokenizer(tokenizer, source)
        table = reading.turns(source, session)
        with Progress("comparing prompts"):
            reasons = tk.analysis.why(table, one_policy(policy), tokenizer=loaded)
    lines: list[str] = []
    for name, own in groupby(reasons.to_pylist(), lambda line: line["session_id"]):
        lines += [] if name is None else [f"session {visible(name)}"]
        lines += [f"  {line['sentence']}" for line in own]
    opt.print_result({"rows": reasons.to_pylist()}, "\n".join(lines), json)


def tree(
    source: opt.Source,
    /,
    *,
    policy: PolicyOption = None,
    session: opt.Session = None,
    reading: opt.Reading = opt.READING,
) -> None:
    """Draw the calls of each session as a tree.

    Shown are which call each continues under a policy, its label if it opens a branch, and
    where its prompt drifts.
    """
    screen, chosen = Screen(), one_policy(policy)
    for table in _each_session(reading.turns(source, session)):
        name = table["session_id"][0].as_py()
        screen.print(f"session {visible(name)}", "head")
        for line in tk.analysis.call_tree(table, name, chosen):
            screen.print(f"  {line}")
