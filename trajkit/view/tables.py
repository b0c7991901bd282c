"""What the page shows of some sessions: an index of them, and a chunk of bytes for each.

Everything is computed by the functions of `trajkit.analysis`. This module only cuts their
tables by session and encodes them.
"""

import gzip
import json
import math
import struct
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa

from trajkit.analysis.branches import label_branches
from trajkit.analysis.drift import classify_drift, explain_drift
from trajkit.analysis.row_reasons import why
from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.simulation import Simulation, label
from trajkit.analysis.tokenizer import Codec, Tokenizer, entry_bytes
from trajkit.analysis.words import LOSS_GROUPS, LOSS_WORDS, MENDS
from trajkit.packs.packing import pack
from trajkit.policies import Policy, rule_of
from trajkit.rows.linearize import rows_and_report
from trajkit.rows.links import link
from trajkit.schema import LOSSES
from trajkit.tables import lazy_compute as pc
from trajkit.tables.take import row_lengths
from trajkit.turns.delta import compact
from trajkit.turns.session_metadata import session_facts
from trajkit.view.violations import Violations

# columns of turns that go into a chunk as they are
_AS_THEY_ARE = (
    "turn_index",
    "shared_length",
    "suffix_ids",
    "output_ids",
    "output_logprobs",
    "output_mask",
    "shared_messages",
    "weight_versions",
)
# columns of turns that the page shows as text
_SHOWN = (
    "finish_reason",
    "trainable",
    "agent_id",
    "model",
    "started_at",
    "ended_at",
)
# an IPC stream must begin at a multiple of this many bytes
_ALIGNMENT = 8
_REPLACEMENT = "\ufffd"
# how SentencePiece writes a space
_SPACE = "\u2581"
# examples of each kind of drift in the index
_N_EXAMPLES = 40


class BySession:
    """A table whose sessions are contiguous, and where each begins and ends."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        ids = table["session_id"].combine_chunks()
        codes = ids.dictionary_encode().indices.to_numpy()
        edges = [0, *(1 + np.flatnonzero(np.diff(codes))).tolist(), len(ids)]
        self.ranges: dict[str, tuple[int, int]] = {
            ids[lo].as_py(): (lo, hi) for lo, hi in pairwise(edges) if lo < hi
        }

    def of(self, session_id: str) -> pa.Table:
        """The lines of a session."""
        lo, hi = self.ranges.get(session_id, (0, 0))
        return self.table.slice(lo, hi - lo)

    def columns(self, session_id: str) -> dict[str, list[Any]]:
        """The lines of a session as lists, without its id."""
        table = self.of(session_id).drop_columns(["session_id"])
        found: dict[str, list[Any]] = table.to_pydict()
        return found


class LinkTables:
    """The tables that depend on a policy's links only."""

    def __init__(
        self, turns: pa.Table, links: pa.Table, tokenizer: Tokenizer | None
    ) -> None:
        self._turns, self._tokenizer = turns, tokenizer
        self.links = BySession(links)

    @cached_property
    def drift(self) -> BySession:
        """`trajkit.schema.DRIFT`, of turns that drift only."""
        drift = classify_drift(self._turns, self.links.table)
        return BySession(drift.filter(pc.greater(drift["size"], 0)))

    @cached_property
    def findings(self) -> BySession | None:
        """`trajkit.schema.FINDINGS`; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return BySession(explain_drift(self._turns, self.links.table, self._tokenizer))

    @cached_property
    def branches(self) -> BySession:
        """`trajkit.schema.BRANCHES`."""
        return BySession(label_branches(self._turns, self.links.table))

    def groups(self) -> list[dict[str, Any]]:
        """Drift over all sessions by cause: counts and the first examples.

        Causes come from texts and every finding counts, or without a tokenizer from token
        ids, and every turn counts once.
        """
        keys, counted = ["region", "cause"], self.drift.table
        if self.findings is not None:
            keys, counted = ["cause"], self.findings.table
        turn = ["session_id", "turn_index"]
        sizes = _frame(self.drift.table, [*turn, "tokens_after_drift"])
        turns = (
            _frame(counted, [*turn, *keys])
            .group_by([*keys, *turn], maintain_order=True)
            .agg(findings=pl.len())
            .join(sizes, on=turn, how="left", maintain_order="left")
        )
        groups = turns.group_by(keys, maintain_order=True).agg(
            pl.col("findings").sum(),
            turns=pl.len(),
            tokens=pl.col("tokens_after_drift").sum(),
            examples=pl.struct(turn).head(_N_EXAMPLES),
        )
        ordered = groups.sort("findings", descending=True, maintain_order=True)
        return [
            {**line, "examples": [list(one.values()) for one in line["examples"]]}
            for line in ordered.to_dicts()
        ]


class PolicyTables:
    """The tables of one policy."""

    def __init__(
        self,
        turns: pa.Table,
        policy: Policy,
        sessions: pa.Table | None,
        links: LinkTables,
    ) -> None:
        self._turns, self._sessions = turns, sessions
        self.policy, self.links = policy, links
        self.label = label(policy)

    @cached_property
    def linearized(self) -> tuple[BySession, BySession]:
        """`trajkit.schema.ROWS` and ``REPORT``."""
        rows, report = rows_and_report(
            self._turns, self.policy, sessions=self._sessions
        )
        return BySession(rows), BySession(report)

    @cached_property
    def rows(self) -> BySession:
        """Each row's turns, tokens and the sentence of `trajkit.analysis.why`."""
        rows, reasons = self.linearized[0].table, why(self._turns, self.policy)
        names = ("session_id", "row_index", "parent_row", "shared_length", "turns")
        columns = {
            **{name: rows[name] for name in names},
            "tokens": row_lengths(rows),
            "trained": reasons["tokens_trained"],
            "sentence": reasons["sentence"],
        }
        return BySession(pa.table(columns))

    @cached_property
    def spans(self) -> BySession:
        """`trajkit.schema.OUTPUT_SPANS`."""
        spans = output_spans(self._turns, self.policy, sessions=self._sessions)
        return BySession(spans)


class ViewTables:
    """Sessions as the page needs them; see `trajkit.view.page` for the parameters."""

    def __init__(
        self,
        turns: pa.Table,
        policies: Iterable[Policy],
        sessions: pa.Table | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        text: bool = True,
        pack_tokens: int | None = None,
        violations: Violations | None = None,
    ) -> None:
        self._turns = BySession(compact(turns))
        self._sessions, self._text = sessions, text
        self._pack_tokens, self._violations = pack_tokens, violations
        self._tokenizer = tokenizer if text else None
        self._facts = session_facts(None, sessions)
        self._by_parents: list[LinkTables] = []
        self.policies = [self._of(policy) for policy in policies]

    def _of(self, policy: Policy) -> PolicyTables:
        """The policy's tables. Policies with the same parents share theirs of links."""
        turns = self._turns.table
        links = link(turns, policy)
        for shared in self._by_parents:
            if shared.links.table["parent"].equals(links["parent"]):
                break
        else:
            shared = LinkTables(turns, links, self._tokenizer)
            self._by_parents.append(shared)
        return PolicyTables(turns, policy, self._sessions, shared)

    @property
    def session_ids(self) -> list[str]:
        """The sessions, in the order of the turns."""
        return list(self._turns.ranges)

    def index(self, title: str, n_runs: int = 1) -> dict[str, Any]:
        """What the page reads first: policies, drift by cause, and a line per session."""
        simulation = Simulation(
            [tables.policy for tables in self.policies], sessions=self._sessions
        )
        if self._turns.table.num_rows:
            simulation.add(self._turns.table)
        groups = {id(links): links.groups() for links in self._by_parents}
        return {
            "title": title,
            "runs": n_runs,
            "losses": {name: LOSS_WORDS[name] for name in LOSSES},
            "groups": LOSS_GROUPS,
            "causes": MENDS,
            "text": self._text,
            "tokenizer": self._tokenizer is not None,
            "policies": simulation.table().to_pylist(),
            "rules": [_rule(tables.policy) for tables in self.policies],
            "drift": [groups[id(tables.links)] for tables in self.policies],
            "sessions": self.session_lines(),
            "violations": self._violations and self._violations.rules(),
        }

    def session_lines(self) -> dict[str, list[Any]]:
        """Columns of the list of sessions. Lists per policy are in the policies' order."""
        turns = self._turns.table
        n_output = pc.list_value_length(turns["output_ids"]).to_numpy()
        n_suffix = pc.list_value_length(turns["suffix_ids"]).to_numpy()
        n_path = turns["shared_length"].to_numpy() + n_suffix + n_output
        facts = self._facts.of(pa.array(self.session_ids, pa.string())).to_pydict()
        drift = self._by_parents[0].drift if self._by_parents else None
        columns: dict[str, list[Any]] = {
            "id": self.session_ids,
            "reward": [_finite(reward) for reward in facts["reward"]],
            "group": facts["group_id"],
            "error": facts["error"],
        }
        if self._violations is not None:
            columns["violations"] = [*map(self._violations.count, self.session_ids)]
        for name in ("turns", "sampled", "context", "logprob", "drifts", "at_stake"):
            columns[name] = []
        for session_id, (lo, hi) in self._turns.ranges.items():
            own = None if drift is None else drift.of(session_id)["tokens_after_drift"]
            logprobs = pc.list_flatten(turns["output_logprobs"].slice(lo, hi - lo))
            for name, value in {
                "turns": hi - lo,
                "sampled": int(n_output[lo:hi].sum()),
                "context": int(n_path[lo:hi].max()),
                "logprob": _finite(pc.mean(logprobs).as_py()),
                "drifts": 0 if own is None else len(own),
                "at_stake": 0 if own is None else pc.sum(own).as_py() or 0,
            }.items():
                columns[name].append(value)
        # a list per session, with a number per policy
        for name, counted in {"trained": "tokens_trained", "rows": "rows"}.items():
            reports = (
                t.linearized[1].table[counted].to_pylist() for t in self.policies
            )
            columns[name] = [list(counts) for counts in zip(*reports, strict=True)]
        return columns

    def chunk(self, session_id: str) -> bytes:
        """One session, compressed: a JSON object, then its turns as an Arrow IPC stream.

        The first four bytes (little endian) are the length of the JSON, which ends in
        spaces so that the stream is aligned.
        """
        turns = self._turns.of(session_id).combine_chunks()
        messages = _Messages(self._text)
        head = json.dumps(
            {
                "id": session_id,
                "policies": [self._policy_lines(t, session_id) for t in self.policies],
                "links": [self._link_lines(t, session_id) for t in self._by_parents],
                "turns": turns.select(
                    [name for name in _SHOWN if name in turns.column_names]
                ).to_pydict(),
                "suffix_messages": messages.lists(turns["suffix_messages"]),
                "response": messages.numbers(turns["response"]),
                "messages": messages.bodies,
                "violations": self._violations and self._violations.of(session_id),
            },
            separators=(",", ":"),
            default=str,  # times
        ).encode()
        head += b" " * (-(len(head) + 4) % _ALIGNMENT)
        sink = pa.BufferOutputStream()
        table = _token_columns(turns)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return gzip.compress(
            struct.pack("<I", len(head)) + head + sink.getvalue().to_pybytes(), mtime=0
        )

    def search(self, word: str) -> list[str]:
        """The sessions one of whose messages contains a word, in either case."""
        if not self._text:
            return []
        found: set[str] = set()
        for name in ("suffix_messages", "response"):
            column = self._turns.table[name]
            ids = self._turns.table["session_id"]
            if name == "suffix_messages":
                ids = ids.take(pc.list_parent_indices(column))
                column = pc.list_flatten(column)
            bodies = pc.struct_field(column, "body")
            hits = pc.match_substring(bodies, word, ignore_case=True)
            found.update(ids.filter(hits.fill_null(False)).to_pylist())
        return [session_id for session_id in self.session_ids if session_id in found]

    def vocabulary(self) -> dict[str, Any] | None:
        """The text of every token that occurs; None without a tokenizer or text."""
        if self._tokenizer is None:
            return None
        ids = pa.chunked_array(
            [
                chunk
                for name in ("suffix_ids", "output_ids")
                for chunk in pc.list_flatten(self._turns.table[name]).chunks
            ],
            pa.int32(),
        )
        return token_pieces(self._tokenizer, pc.unique(ids).to_pylist())

    def _policy_lines(self, tables: PolicyTables, session_id: str) -> dict[str, Any]:
        (report,) = tables.linearized[1].of(session_id).to_pylist()
        return {
            "label": tables.label,
            "links": self._by_parents.index(tables.links),
            "report": {name: n for name, n in report.items() if isinstance(n, int)},
            "rows": tables.rows.columns(session_id),
            "spans": tables.spans.columns(session_id),
            "packs": self._packs(tables, session_id),
        }

    def _packs(self, tables: PolicyTables, session_id: str) -> list[dict[str, Any]]:
        """The packs of a session's rows, as the segments of their trees."""
        if self._pack_tokens is None:
            return []
        own = tables.linearized[0].of(session_id)
        packs = pack(own, self._pack_tokens, oversize="carry")
        lines = packs.select(["n_tokens", "segment_start", "subtree_end"]).to_pylist()
        return [
            {
                "tokens": line["n_tokens"],
                "start": line["segment_start"],
                # queries that attend to the segment's tokens end here
                "end": [line["subtree_end"][start] for start in line["segment_start"]],
            }
            for line in lines
        ]

    def _link_lines(self, tables: LinkTables, session_id: str) -> dict[str, Any]:
        findings = tables.findings
        return {
            "links": tables.links.columns(session_id),
            "drift": tables.drift.columns(session_id),
            "branches": tables.branches.columns(session_id),
            "findings": None if findings is None else findings.columns(session_id),
        }


class _Messages:
    """The distinct messages of a session, numbered."""

    def __init__(self, text: bool) -> None:
        self._text = text
        self._numbers: dict[bytes, int] = {}
        # role and JSON; the text is null if unknown or not wanted
        self.bodies: list[list[str | None]] = []

    def _number(self, message: dict[str, Any] | None) -> int | None:
        if message is None:
            return None
        number = self._numbers.setdefault(message["key"], len(self.bodies))
        if number == len(self.bodies):
            self.bodies.append([message["role"], None])
        if self._text and message["body"] is not None:
            self.bodies[number][1] = message["body"]
        return number

    def lists(self, column: pa.ChunkedArray) -> list[list[int | None] | None]:
        return [
            None if one is None else [self._number(message) for message in one]
            for one in column.to_pylist()
        ]

    def numbers(self, column: pa.ChunkedArray) -> list[int | None]:
        return [self._number(message) for message in column.to_pylist()]


def _token_columns(turns: pa.Table) -> pa.Table:
    """The columns of a chunk's Arrow stream: base turns as indices, token columns."""
    index = turns["turn_index"].to_numpy()
    base = turns["base_turn"]
    known = base.is_valid().to_numpy()
    at = np.searchsorted(index, base.fill_null(0).to_numpy())
    columns = {
        "base": pa.array(at.astype(np.int32), mask=~known),
        **{name: turns[name] for name in _AS_THEY_ARE if name in turns.column_names},
    }
    lengths = pc.list_value_length(turns["output_ids"])
    for name, type_ in zip(turns.schema.names, turns.schema.types, strict=True):
        # a number per sampled token, such as an entropy or an advantage
        is_list = isinstance(type_, pa.ListType | pa.LargeListType)
        if name not in columns and is_list and pa.types.is_floating(type_.value_type):
            own = pc.list_value_length(turns[name]).cast(pa.int64())
            if pc.all(pc.equal(own, lengths)).as_py():
                columns[name] = turns[name]
    return pa.table(columns)


def _frame(table: pa.Table, names: list[str]) -> pl.DataFrame:
    """Some columns of a table; names are texts."""
    frame = cast("pl.DataFrame", pl.from_arrow(table.select(names)))
    return frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))


def _finite(number: float | None) -> float | None:
    """The number if JSON has it."""
    return number if number is not None and math.isfinite(number) else None


def _rule(policy: Policy) -> str:
    """What a policy does where a prompt drifts, in a few sentences."""
    if policy.parent_by == "none":
        return "Every call is a row."
    if policy.parent_by == "generations":
        n = policy.fork_threshold
        return f"A call is refused if its prompt drifts by {n:,} or more tokens."
    rule = rule_of(policy, "on_drift")
    if policy.absorbs:
        rule += (
            " A reply that drifted is then trained up to the drift."
            if policy.keep_prefix
            else " No token of a reply that drifted is then trained."
        )
    return "Where a prompt drifts: " + rule[0].lower() + rule[1:]


def token_pieces(tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """Columns of the tokens: id, text, bytes in hexadecimal, whether it is special.

    Of text and bytes one is null: bytes are given for a token that is not text on its
    own, because it begins or ends inside a character.
    """
    codec, ids = Codec(tokenizer), sorted(ids)
    texts: list[str | None] = []
    hexes: list[str | None] = []
    for token in ids:
        text, entry = codec.text([token]), codec.entry(token) or ""
        raw = entry_bytes(entry) if entry and _REPLACEMENT in text else None
        # SentencePiece drops the space at the start of a text
        spaced = entry.replace(_SPACE, " ")
        if spaced.lstrip(" ") == text.lstrip(" "):
            text = spaced
        texts.append(text if raw is None else None)
        hexes.append(None if raw is None else raw.hex())
    special = codec.special(np.array(ids, np.int32)).astype(int).tolist()
    return {"id": ids, "text": texts, "hex": hexes, "special": special}


def packed(value: object) -> bytes:
    """A JSON value, compressed."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)
