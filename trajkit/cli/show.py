"""Look in the terminal: show, why, tree, head and stats."""

import json as json_lines
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa
from cyclopts import Parameter

import trajkit as tk
from trajkit.analysis.tokenizer import Codec, Ids
from trajkit.analysis.words import count
from trajkit.cli import options as opt
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import (
    Fragment,
    Progress,
    Screen,
    shortened,
    text_table,
    visible,
)
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.errors import ArgumentError
from trajkit.files.arrow import table_kind
from trajkit.files.formats import format_of, paths_in
from trajkit.files.sources import Paths, paths_of
from trajkit.files.tables import iter_tables, log_files, read_any_rows
from trajkit.schema import EMPTY_KINDS
from trajkit.tables.columns import take_session, tuples
from trajkit.turns.sessions import Sessions
from trajkit.verification import row_forms

# characters of a message where there is no tokenizer
_MAX_MESSAGE = 160
# tokens of an example of drift: at both ends of the span, and around it
_MAX_TOKENS, _AROUND = 12, 3
# texts up to this length may be names; of more names than this, the number is shown
_LONGEST_NAME, _MOST_NAMES = 32, 4
# columns of a screen for a column of a table
_CELL = 14
_ENDS = ("min", "mean", "max", "sum")


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
    no_color: bool = False,
    reading: opt.Reading = opt.READING,
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
        if session is not None:
            rows = take_session(rows, session, "rows")
        view.rows(rows, row)
        return
    chosen = one_policy(policy)
    for table in _each_session(reading.turns(source, session)):
        view.outputs = dict(tuples(table, "turn_index", "output_ids"))
        view.messages = {} if codec else _messages(table)
        lines = tk.analysis.output_spans(table, chosen).to_pylist()
        view.drift = {
            (one["turn_index"], one["output_start"]): one["drift_turn"] for one in lines
        }
        view.rows(tk.linearize(table, chosen), row)
        lost = [line for line in lines if line["row_index"] is None]
        if lost and row is None:
            name = visible(lost[0]["session_id"])
            view.screen.print(f"session {name}, in no row", "head")
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


def _messages(turns: pa.Table) -> dict[int, list[tuple[str, str]]]:
    """Role and text of the messages of each turn, request and reply, of one session."""
    bodies: dict[bytes, str] = {}
    found: dict[int, list[tuple[str, str]]] = {}
    for turn, *parts in tuples(tk.expand(turns), "turn_index", "messages", "response"):
        found[turn] = lines = []
        for message in filter(None, [*(parts[0] or []), parts[1]]):
            if message["body"] is not None:
                bodies[message["key"]] = _content(message["body"])
            lines.append((message["role"], bodies.get(message["key"], "")))
    return found


def _content(body: str) -> str:
    """The text of a message; its JSON if it has more than text."""
    try:
        message = json_lines.loads(body)
    except ValueError:
        return body
    content = message.get("content")
    only = isinstance(content, str) and message.keys() <= {"role", "content"}
    return content if only else body


@dataclass(slots=True)
class _View:
    """How rows are printed, and what turns say of them."""

    screen: Screen
    # None: ids are printed
    codec: Codec | None
    # tokens at both ends of long context. None: all
    context: int | None
    outputs: dict[int, list[int]] = field(default_factory=dict)
    messages: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
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
        for k in [k for k, name in enumerate(names) if index in (None, name)]:
            self._row(rows.slice(k, 1).to_pylist()[0])

    def _row(self, row: dict[str, Any]) -> None:
        ids, fold = np.array(row["input_ids"], np.int32), self.context is not None
        session, n = row.get("session_id"), sum(row.get("loss_mask") or [])
        place = "" if session is None else f"session {visible(str(session))}, "
        head = f"{place}row {row['row_index']}: {len(ids):,} tokens, {n:,} trained"
        self.screen.print(head, "head")
        for role, text in self.messages.get(row.get("last_turn", -1), []):
            shown = shortened(text, _MAX_MESSAGE if fold else len(text))
            self.screen.labelled(visible(role), [(shown, "")])
        first, parts = 0, [*_parts(row, len(ids))]
        if fold and row.get("parent_row") is not None:
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
    for span in [*spans, {"kind": "end", "start": n_tokens, "stop": n_tokens}]:
        if span["start"] > at:
            yield "context", at, span["start"], {}
        kind = "lost" if span["kind"] in EMPTY_KINDS else span["kind"]
        if kind != "end":
            yield kind, span["start"], span["stop"], span
        at = span["stop"]


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
        loaded = chosen_tokenizer(tokenizer, source)
        table = reading.turns(source, session)
        with Progress("comparing prompts"):
            reasons = tk.analysis.why(table, one_policy(policy), tokenizer=loaded)
    lines, last = [], None
    for name, sentence in tuples(reasons, "session_id", "sentence"):
        if name != last:
            lines.append(f"session {visible(name)}")
        lines.append(f"  {sentence}")
        last = name
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


def stored_tables(source: Paths, batch_rows: int | None = None) -> Iterator[pa.Table]:
    """The tables of files, or the turns of directories, some lines at a time.

    No line at all is an error.
    """
    empty = True
    for file in log_files(source)[0]:
        for table in iter_tables(file, batch_rows=batch_rows):
            empty = empty and not table.num_rows
            yield table
    if empty:
        raise opt.nothing(source, "lines")


def head(
    source: opt.Source,
    /,
    *,
    lines: Annotated[opt.Count, Parameter(name=("--lines", "-n"))] = 10,
) -> None:
    """Print the first lines of a table.

    Print the first lines of a file of any table: turns, rows, packs, links, drift,
    sessions, a report. Lists are shortened, and columns that do not fit left out.

    Parameters
    ----------
    lines
        The number of lines.
    """
    screen, tables, wanted = Screen(), list[pl.DataFrame](), lines
    for table in stored_tables(source, lines):
        tables.append(pl.DataFrame(table.slice(0, wanted)))
        wanted -= table.num_rows
        if wanted <= 0:
            break
    frame = pl.concat(tables, how="diagonal_relaxed")
    texts = pl.col(pl.String).map_elements(visible, return_dtype=pl.String)
    width = screen.width or 0
    with pl.Config(
        fmt_str_lengths=_LONGEST_NAME,
        tbl_cols=max(width // _CELL, 1) if width else -1,
        tbl_formatting="NOTHING",
        tbl_hide_dataframe_shape=True,
        tbl_hide_dtype_separator=True,
        tbl_rows=-1,
        tbl_width_chars=width or -1,
    ):
        for line in str(frame.with_columns(texts)).split("\n"):
            screen.print(visible(line[1:]).rstrip())


def stats(source: opt.Source, /, *, json: opt.Json = False) -> None:
    """Summarize the columns of a table.

    Print, for each column of a file of any table, its type, nulls, and the least, mean and
    largest value and the sum: of lists and texts the length, of flags and masks the number
    that is true; of names the counts.
    """
    columns: dict[str, dict[str, Any]] = {}
    # a number for each value, see `_measured`
    parts: list[pl.DataFrame] = []
    for table in stored_tables(source):
        measures = []
        for values in pl.DataFrame(table):
            name, (of, numbers) = values.name, _measured(values)
            # sums of small integers would overflow
            large = pl.Int64 if numbers.dtype.is_integer() else numbers.dtype
            measures.append(numbers.cast(large).alias(name))
            first = {
                "type": str(values.dtype),
                "nulls": 0,
                "of": of,
                "names": Counter(),
            }
            column = columns.setdefault(name, first)
            column["nulls"] += values.null_count()
            longest: Any = numbers.max() if of == "characters" else None
            if values.dtype == pl.Categorical or (longest or 99) <= _LONGEST_NAME:
                counts = values.drop_nulls().cast(pl.String).value_counts()
                column["names"].update(dict(counts.rows()))
        parts.append(pl.DataFrame(measures))
    whole = pl.concat(parts, how="diagonal_relaxed")
    lines = []
    for name, column in columns.items():
        names, numbers = column["names"], whole[name]
        column |= {end: getattr(numbers, end)() for end in _ENDS}
        if names:
            shown = [f"{visible(value)} {n:,}" for value, n in names.most_common()]
            many = len(shown) > _MOST_NAMES
            column["of"] = f"{len(shown):,} names" if many else ", ".join(shown)
        of = "" if column["min"] is None and not names else column["of"]
        cells = [_number(column[end]) for end in ("nulls", *_ENDS)]
        lines.append([shortened(name, 40), shortened(column["type"], 24), *cells, of])
    head = ("column", "type", "nulls", *_ENDS, "of")
    text = f"{len(whole):,} lines\n\n{text_table(head, lines)}"
    opt.print_result({"lines": len(whole), "columns": columns}, text, json)


def _measured(values: pl.Series) -> tuple[str, pl.Series]:
    """What is measured of values, and the measures; null for those that have none."""
    if values.dtype == pl.Array:
        values = values.arr.to_list()
    if values.dtype == pl.List(pl.Boolean):
        return "true flags", values.list.sum()
    if values.dtype == pl.List:
        return "length", values.list.len()
    if values.dtype == pl.Boolean:
        return "true flags", values.cast(pl.Int64)
    if values.dtype == pl.String:
        return "characters", values.str.len_chars()
    nothing = pl.repeat(None, len(values), dtype=pl.Int64, eager=True)
    return "value", values if values.dtype.is_numeric() else nothing


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
