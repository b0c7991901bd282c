"""What the page shows of some sessions: an index of them, and a chunk of bytes for each.

Everything is computed by the functions of `trajkit.analysis` and `trajkit.verify`. This
module only cuts their tables by session and encodes them.
"""

import gzip
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from trajkit.analysis.branches import label_branches
from trajkit.analysis.drift import classify_drift, explain_drift
from trajkit.analysis.rows import why
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
from trajkit.tables.take import row_lengths, tuples
from trajkit.turns.delta import compact
from trajkit.turns.session_metadata import session_facts
from trajkit.turns.sessions import run_starts
from trajkit.verification.run import verify

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
# violations of a session that are shown, and tokens before and after the first wrong one
_N_VIOLATIONS, _AROUND = 200, 8

Columns: TypeAlias = dict[str, list[Any]]
Violations: TypeAlias = dict[str | None, list[dict[str, Any]]]
"""Lines of `trajkit.schema.VIOLATIONS` by session."""


class _BySession:
    """A table, and its lines of each session."""

    def __init__(self, table: pa.Table) -> None:
        self.frame = pl.DataFrame(table)
        self._parts = self.frame.partition_by("session_id", as_dict=True)

    def columns(self, session_id: str) -> Columns:
        """The lines of a session as lists, without its id."""
        part = self._parts.get((session_id,), self.frame.clear())
        columns: Columns = part.drop("session_id").to_dict(as_series=False)
        return columns


class _LinkTables:
    """The tables that depend on a policy's links only."""

    def __init__(
        self, turns: pa.Table, links: pa.Table, tokenizer: Tokenizer | None
    ) -> None:
        self._turns, self.links, self._tokenizer = turns, links, tokenizer

    @cached_property
    def drift(self) -> _BySession:
        """`trajkit.schema.DRIFT`, of turns that drift only."""
        drift = classify_drift(self._turns, self.links)
        return _BySession(drift.filter(pc.greater(drift["size"], 0)))

    @cached_property
    def findings(self) -> _BySession | None:
        """`trajkit.schema.FINDINGS`; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return _BySession(explain_drift(self._turns, self.links, self._tokenizer))

    @cached_property
    def shown(self) -> dict[str, _BySession | None]:
        """Everything that a chunk has, by its name there."""
        return {
            "links": _BySession(self.links),
            "drift": self.drift,
            "branches": _BySession(label_branches(self._turns, self.links)),
            "findings": self.findings,
        }

    def groups(self) -> list[dict[str, Any]]:
        """Drift over all sessions by cause: counts and the first examples.

        Causes come from texts and every finding counts, or without a tokenizer from token
        ids, and every turn counts once.
        """
        counted, keys = self.findings, ["cause"]
        if counted is None:
            counted, keys = self.drift, ["region", "cause"]
        turn = ["session_id", "turn_index"]
        sizes = self.drift.frame.select(*turn, "tokens_after_drift")
        groups = (
            counted.frame.with_columns(pl.col(*keys).cast(pl.String))
            .group_by([*keys, *turn], maintain_order=True)
            .agg(findings=pl.len())
            .join(sizes, on=turn, how="left", maintain_order="left")
            .group_by(keys, maintain_order=True)
            .agg(
                pl.col("findings").sum(),
                turns=pl.len(),
                tokens=pl.col("tokens_after_drift").sum(),
                examples=pl.struct(turn).head(_N_EXAMPLES),
            )
            .sort("findings", descending=True, maintain_order=True)
        )
        return [
            {**line, "examples": [list(one.values()) for one in line["examples"]]}
            for line in groups.to_dicts()
        ]


class _PolicyTables:
    """The tables of one policy."""

    def __init__(
        self,
        turns: pa.Table,
        policy: Policy,
        sessions: pa.Table | None,
        links: _LinkTables,
    ) -> None:
        self._turns, self._sessions = turns, sessions
        self.policy, self.links = policy, links

    @cached_property
    def linearized(self) -> tuple[pa.Table, pa.Table]:
        """`trajkit.schema.ROWS` and ``REPORT``."""
        return rows_and_report(self._turns, self.policy, sessions=self._sessions)

    @cached_property
    def shown(self) -> dict[str, _BySession]:
        """Everything that a chunk has, by its name there."""
        (rows, report), reasons = self.linearized, why(self._turns, self.policy)
        names = ("session_id", "row_index", "parent_row", "shared_length", "turns")
        columns = {
            **{name: rows[name] for name in names},
            "tokens": row_lengths(rows),
            "trained": reasons["tokens_trained"],
            "sentence": reasons["sentence"],
        }
        counts = [f.name for f in report.schema if pa.types.is_integer(f.type)]
        spans = output_spans(self._turns, self.policy, sessions=self._sessions)
        return {
            "report": _BySession(report.select(["session_id", *counts])),
            "rows": _BySession(pa.table(columns)),
            "spans": _BySession(spans),
        }


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
        self._turns = turns = compact(turns)
        starts = run_starts(turns)
        self.session_ids: list[str] = turns["session_id"].take(starts).to_pylist()
        bounds = pairwise([*starts.tolist(), turns.num_rows])
        self._bounds = dict(zip(self.session_ids, bounds, strict=True))
        self._sessions, self._text = sessions, text
        self._pack_tokens, self._violations = pack_tokens, violations
        self._tokenizer = tokenizer if text else None
        # policies with the same parents share their tables of links
        self._links: list[_LinkTables] = []
        self._policies: list[_PolicyTables] = []
        for policy in policies:
            links = link(turns, policy)
            same = (t for t in self._links if t.links["parent"] == links["parent"])
            if (shared := next(same, None)) is None:
                shared = _LinkTables(turns, links, self._tokenizer)
                self._links.append(shared)
            self._policies.append(_PolicyTables(turns, policy, sessions, shared))

    def index(self, title: str, n_runs: int = 1) -> dict[str, Any]:
        """What the page reads first: policies, drift by cause, and a line per session."""
        policies = [tables.policy for tables in self._policies]
        simulation = Simulation(policies, sessions=self._sessions)
        if self._turns.num_rows:
            simulation.add(self._turns)
        groups = [links.groups() for links in self._links]
        rules = None
        if self._violations is not None:
            lines = (line for of in self._violations.values() for line in of)
            rules = Counter(line["rule"] for line in lines).most_common()
        return {
            "title": title,
            "runs": n_runs,
            "losses": {name: LOSS_WORDS[name] for name in LOSSES},
            "groups": LOSS_GROUPS,
            "causes": MENDS,
            "text": self._text,
            "tokenizer": self._tokenizer is not None,
            "policies": simulation.table().to_pylist(),
            "rules": [rule_in_words(policy) for policy in policies],
            "drift": [groups[self._links.index(t.links)] for t in self._policies],
            "sessions": self.session_lines(),
            "violations": rules,
        }

    def session_lines(self) -> Columns:
        """Columns of the list of sessions. Lists per policy are in the policies' order."""
        names = ["session_id", "shared_length", "suffix_ids", "output_ids"]
        frame = pl.DataFrame(self._turns.select([*names, "output_logprobs"]))
        n_output = pl.col("output_ids").list.len()
        n_path = pl.col("shared_length") + pl.col("suffix_ids").list.len() + n_output
        mean = pl.col("output_logprobs").explode().cast(pl.Float64).mean()
        lines = frame.group_by("session_id", maintain_order=True).agg(
            turns=pl.len(), sampled=n_output.sum(), context=n_path.max(), logprob=mean
        )
        drift = self._links[0].drift.frame.group_by("session_id")
        own = drift.agg(drifts=pl.len(), at_stake=pl.col("tokens_after_drift").sum())
        lines = lines.join(own, "session_id", how="left", maintain_order="left")
        lines = lines.with_columns(pl.col("drifts", "at_stake").fill_null(0))
        columns: Columns = lines.to_dict(as_series=False)
        ids = columns.pop("session_id")
        columns["logprob"] = [
            n if n is not None and math.isfinite(n) else None
            for n in columns["logprob"]
        ]
        facts = session_facts(None, self._sessions).of(pa.array(ids, pa.string()))
        known = {
            "id": ids,
            "reward": facts["reward"].to_pylist(),
            "group": facts["group_id"].to_pylist(),
            "error": facts["error"].to_pylist(),
        }
        if self._violations is not None:
            known["violations"] = [len(self._violations.get(name, ())) for name in ids]
        # a list per session, with a number per policy
        for name, counted in {"trained": "tokens_trained", "rows": "rows"}.items():
            reports = (t.linearized[1][counted].to_pylist() for t in self._policies)
            columns[name] = [list(numbers) for numbers in zip(*reports, strict=True)]
        return known | columns

    def chunk(self, session_id: str) -> bytes:
        """One session, compressed: a JSON object, then its turns as an Arrow IPC stream.

        The first four bytes (little endian) are the length of the JSON, which ends in
        spaces so that the stream is aligned.
        """
        start, stop = self._bounds[session_id]
        turns = self._turns.slice(start, stop - start).combine_chunks()
        shown = [name for name in _SHOWN if name in turns.column_names]
        violations = self._violations
        head = json.dumps(
            {
                "id": session_id,
                "policies": [self._policy_lines(t, session_id) for t in self._policies],
                "links": [
                    {
                        name: None if of is None else of.columns(session_id)
                        for name, of in tables.shown.items()
                    }
                    for tables in self._links
                ],
                "turns": turns.select(shown).to_pydict(),
                **_messages(turns, self._text),
                "violations": violations
                and violations.get(session_id, [])[:_N_VIOLATIONS],
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
        ids, found = self._turns["session_id"], set()
        shown = self._turns["suffix_messages"]
        for owners, messages in (
            (ids, self._turns["response"]),
            (ids.take(pc.list_parent_indices(shown)), pc.list_flatten(shown)),
        ):
            bodies = pc.struct_field(messages, "body")
            hits = pc.match_substring(bodies, word, ignore_case=True)
            found.update(owners.filter(hits.fill_null(False)).to_pylist())
        return [name for name in self.session_ids if self._text and name in found]

    def vocabulary(self) -> dict[str, Any] | None:
        """The text of every token that occurs; None without a tokenizer or text."""
        if self._tokenizer is None:
            return None
        ids: set[int] = set()
        for name in ("suffix_ids", "output_ids"):
            ids.update(pc.unique(pc.list_flatten(self._turns[name])).to_pylist())
        return token_pieces(self._tokenizer, [*ids])

    def _policy_lines(self, tables: _PolicyTables, session_id: str) -> dict[str, Any]:
        lines = {name: of.columns(session_id) for name, of in tables.shown.items()}
        packs = []
        if self._pack_tokens is not None:
            rows = tables.linearized[0]
            own = rows.filter(pc.equal(rows["session_id"], session_id))
            for n_tokens, starts, ends in tuples(
                pack(own, self._pack_tokens, oversize="carry"),
                *("n_tokens", "segment_start", "subtree_end"),
            ):
                # segments of a tree, and where the queries that attend to each end
                ends = [ends[start] for start in starts]
                packs.append({"tokens": n_tokens, "start": starts, "end": ends})
        return {
            "label": label(tables.policy),
            "links": self._links.index(tables.links),
            **lines,
            "report": {name: n for name, (n,) in lines["report"].items()},
            "packs": packs,
        }


def find_violations(
    rows: pa.Table,
    turns: pa.Table,
    policy: Policy | None = None,
    sessions: pa.Table | None = None,
) -> Violations:
    """What `trajkit.verify` finds in rows, by session.

    The first of a session have the tokens around the first wrong one. Rows of another
    system may have no ids; their tokens are not shown then.
    """
    found: Violations = {}
    for line in verify(rows, turns, policy, sessions=sessions).to_pylist():
        found.setdefault(line["session_id"], []).append(line)
    numbers = {}
    if {"session_id", "row_index"} <= {*rows.column_names}:
        keys = enumerate(tuples(rows, "session_id", "row_index"))
        numbers = {key: k for k, key in keys}
    for lines in found.values():
        for line in lines[:_N_VIOLATIONS]:
            k = numbers.get((line["session_id"], line["row_index"]))
            if k is None:
                line["ids"] = None
                continue
            ids, mask = rows["input_ids"][k].values, rows["loss_mask"][k].values
            # a mask may cover the response only
            before, token = len(ids) - len(mask), line["token"] or 0
            start, stop = max(token - _AROUND, 0), min(token + _AROUND + 1, len(ids))
            line["start"] = start
            line["ids"] = ids[start:stop].to_pylist()
            line["mask"] = [
                at >= before and bool(mask[at - before].as_py())
                for at in range(start, stop)
            ]
    return found


def _messages(turns: pa.Table, text: bool) -> dict[str, list[Any]]:
    """The distinct messages of a session, and the numbers of those of each turn.

    A message is its role and its JSON, which is null if unknown or not wanted.
    """
    numbers: dict[bytes, int] = {}
    bodies: list[list[str | None]] = []

    def number(message: dict[str, Any] | None) -> int | None:
        if message is None:
            return None
        k = numbers.setdefault(message["key"], len(bodies))
        if k == len(bodies):
            bodies.append([message["role"], None])
        if text and message["body"] is not None:
            bodies[k][1] = message["body"]
        return k

    lists = turns["suffix_messages"].to_pylist()
    return {
        "suffix_messages": [one and [number(of) for of in one] for one in lists],
        "response": [number(of) for of in turns["response"].to_pylist()],
        "messages": bodies,
    }


def _token_columns(turns: pa.Table) -> pa.Table:
    """The columns of a chunk's Arrow stream: base turns as indices, token columns."""
    base = pc.index_in(turns["base_turn"], turns["turn_index"])
    columns = {
        "base": base,
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


def rule_in_words(policy: Policy) -> str:
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
    special = codec.special(np.array(ids, np.int32)).astype(int).tolist()
    columns: Columns = {"id": ids, "text": [], "hex": [], "special": special}
    for token in ids:
        text, entry = codec.text([token]), codec.entry(token) or ""
        raw = entry_bytes(entry) if entry and _REPLACEMENT in text else None
        # SentencePiece drops the space at the start of a text
        spaced = entry.replace(_SPACE, " ")
        if spaced.lstrip(" ") == text.lstrip(" "):
            text = spaced
        columns["text"].append(text if raw is None else None)
        columns["hex"].append(None if raw is None else raw.hex())
    return columns


def packed(value: object) -> bytes:
    """A JSON value, compressed."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)
