"""What the page shows of some sessions: an index of them, and a chunk of bytes for each.

Everything is computed by the functions of `trajkit.analysis` and `trajkit.verify`. This
module only cuts their tables by session and encodes them.
"""

import gzip
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa

from trajkit import analysis
from trajkit.analysis.branches import drifted
from trajkit.analysis.simulation import label, simulate
from trajkit.analysis.tokenizer import Codec, Tokenizer
from trajkit.analysis.words import COUNT_WORDS, LOSS_GROUPS, LOSS_WORDS, MENDS
from trajkit.errors import UnknownSessionError
from trajkit.policies import Policy, rule_of
from trajkit.rows.linearize import linearize, link, report
from trajkit.schema import TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables.columns import take_session, tuples
from trajkit.tables.stages import whole_sessions
from trajkit.turns.delta import compact
from trajkit.verification.run import verify

# columns of turns that go into a chunk as they are, and those that the page shows as text
_AS_THEY_ARE = (
    "turn_index shared_length suffix_ids output_ids output_logprobs output_mask "
    "shared_messages weight_versions"
).split()
_SHOWN = "finish_reason trainable agent_id model started_at ended_at".split()
_TURN = ["session_id", "turn_index"]
_OF_ROWS = "session_id row_index parent_row shared_length turns".split()
# violations of a session that are shown, and tokens before and after the first wrong one
_N_VIOLATIONS, _AROUND = 200, 8

Violations: TypeAlias = dict[str | None, list[dict[str, Any]]]
"""Lines of `trajkit.schema.VIOLATIONS` by session."""


@dataclass(eq=False)
class ViewTables:
    """Sessions as the page needs them; see `trajkit.view.page` for the parameters."""

    turns: pa.Table
    policies: Sequence[Policy]
    sessions: pa.Table | None = None
    tokenizer: Tokenizer | None = None
    text: bool = True
    violations: Violations | None = None

    def __post_init__(self) -> None:
        self.turns = turns = compact(self.turns)
        self.session_ids: list[str] = pc.unique(turns["session_id"]).to_pylist()
        self.tokenizer = self.tokenizer if self.text else None
        # policies with the same parents share their links, which each has by number
        links = [link(turns, policy) for policy in self.policies]
        parents = [tuple(one["parent"].to_pylist()) for one in links]
        distinct = [*dict.fromkeys(parents)]
        self._links = [links[parents.index(one)] for one in distinct]
        self._links_of = [*map(distinct.index, parents)]
        # tables are made on first use
        self._table = cache(self._make)

    def _make(self, name: str, k: int) -> pl.DataFrame:
        """A table of the links, or of the policy, of this number."""
        turns, known = self.turns, self.sessions
        match name:
            case "links":
                made = self._links[k]
            case "drift":
                made = drifted(turns, self._links[k])
            case "branches":
                made = analysis.label_branches(turns, self._links[k])
            case "findings" if self.tokenizer is not None:
                made = analysis.explain_drift(turns, self._links[k], self.tokenizer)
                return pl.DataFrame(made).join(self._table("drift", k), _TURN, "semi")
            case "report":
                made = report(turns, self.policies[k], sessions=known)
            case "spans":
                made = analysis.output_spans(turns, self.policies[k], sessions=known)
            case _:
                made = linearize(turns, self.policies[k], sessions=known)
                reasons = analysis.why(turns, self.policies[k], sessions=known)
                return pl.DataFrame(made.select([*_OF_ROWS, "input_ids"])).select(
                    *_OF_ROWS,
                    tokens=pl.col("input_ids").list.len(),
                    sentence=pl.Series(reasons["sentence"]),
                    trained=pl.Series(reasons["tokens_trained"]),
                )
        return pl.DataFrame(made)

    def _lists(self, names: Sequence[str], k: int, session_id: str) -> dict[str, Any]:
        """The lines of a session in some tables, as columns without its id."""
        own = pl.col("session_id") == session_id
        found = ((name, self._table(name, k).filter(own)) for name in names)
        return {
            name: one.drop("session_id").to_dict(as_series=False) for name, one in found
        }

    def index(self, title: str, n_runs: int = 1) -> dict[str, Any]:
        """What the page reads first: policies, drift by cause, and a line per session."""
        counts = simulate(self.turns, self.policies, sessions=self.sessions)
        groups = [self._groups(k) for k in range(len(self._links))]
        found = self.violations
        rules = Counter(line["rule"] for own in (found or {}).values() for line in own)
        return {
            "title": title,
            "runs": n_runs,
            "heads": COUNT_WORDS,
            "losses": LOSS_WORDS,
            "groups": LOSS_GROUPS,
            "causes": MENDS,
            "text": self.text,
            "tokenizer": self.tokenizer is not None,
            "policies": counts.to_pylist(),
            "rules": [rule_in_words(policy) for policy in self.policies],
            "drift": [groups[number] for number in self._links_of],
            "sessions": self.session_lines().to_dict(as_series=False),
            "violations": None if found is None else rules.most_common(),
        }

    def _groups(self, k: int) -> list[dict[str, Any]]:
        """Drift over all sessions by cause: counts and the first examples.

        Causes come from texts and every finding counts, or without a tokenizer from token
        ids, and every turn counts once.
        """
        drift, keys = self._table("drift", k), ["region", "cause"]
        counted = drift
        if self.tokenizer is not None:
            counted, keys = self._table("findings", k), ["cause"]
        return (
            counted.select(*_TURN, pl.col(*keys).cast(pl.String))
            .group_by(*keys, *_TURN, maintain_order=True)
            .agg(findings=pl.len())
            .join(
                drift.select(*_TURN, "tokens_after_drift"), _TURN, maintain_order="left"
            )
            .group_by(keys, maintain_order=True)
            .agg(
                pl.col("findings").sum(),
                turns=pl.len(),
                tokens=pl.col("tokens_after_drift").sum(),
                examples=pl.struct(_TURN).head(40),
            )
            .sort("findings", descending=True, maintain_order=True)
            .to_dicts()
        )

    def session_lines(self) -> pl.DataFrame:
        """The list of sessions. Lists per policy are in the policies' order."""
        n_output = pl.col("output_ids").list.len()
        n_path = pl.col("shared_length") + pl.col("suffix_ids").list.len() + n_output
        logprob = pl.col("output_logprobs").explode().cast(pl.Float64).mean()
        names = "session_id shared_length suffix_ids output_ids output_logprobs".split()
        reports = [self._table("report", k) for k in range(len(self.policies))]
        drifts, found = Counter(self._table("drift", 0)["session_id"]), self.violations
        of_turns = (
            pl.DataFrame(self.turns.select(names))
            .group_by("session_id", maintain_order=True)
            .agg(context=n_path.max(), logprob=logprob)
        )
        ids = self.session_ids
        wrong = [None if found is None else len(found.get(one, ())) for one in ids]
        return reports[0].select(
            "turns",
            "reward",
            "error",
            id="session_id",
            group="group_id",
            sampled="tokens_sampled",
            context=of_turns["context"],
            logprob=pl.when(of_turns["logprob"].is_finite()).then(of_turns["logprob"]),
            drifts=pl.Series([drifts[one] for one in ids], dtype=pl.Int64),
            violations=pl.Series(wrong),
            trained=pl.concat_list([one["tokens_trained"] for one in reports]),
            rows=pl.concat_list([one["rows"] for one in reports]),
        )

    def chunk(self, session_id: str) -> bytes:
        """One session, compressed: a JSON object, then its turns as an Arrow IPC stream.

        The first four bytes (little endian) are the length of the JSON, which ends in
        spaces so that the stream begins at a multiple of 8 bytes.
        """
        turns = take_session(self.turns, session_id).combine_chunks()
        number = self.session_ids.index(session_id)
        of_links = ["links", "drift", "branches"]
        of_links += ["findings"] * (self.tokenizer is not None)
        policies = [
            {
                "label": label(policy),
                "links": self._links_of[k],
                "report": self._table("report", k)[number]
                .select(cs.integer())
                .to_dicts()[0],
                **self._lists(["rows", "spans"], k, session_id),
            }
            for k, policy in enumerate(self.policies)
        ]
        found = None
        if self.violations is not None:
            found = self.violations.get(session_id, [])[:_N_VIOLATIONS]
        shown = [name for name in _SHOWN if name in turns.column_names]
        facts = {
            "id": session_id,
            "policies": policies,
            "links": [
                self._lists(of_links, k, session_id) for k in range(len(self._links))
            ],
            "turns": turns.select(shown).to_pydict(),
            **messages_of(turns, self.text),
            "violations": found,
        }
        # times are texts
        head = json.dumps(facts, separators=(",", ":"), default=str).encode()
        head += b" " * (-(len(head) + 4) % 8)
        sink = pa.BufferOutputStream()
        table = _token_columns(turns)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        content = struct.pack("<I", len(head)) + head + sink.getvalue().to_pybytes()
        return gzip.compress(content, mtime=0)

    def vocabulary(self) -> dict[str, Any] | None:
        """The text of every token that occurs; None without a tokenizer or text."""
        if self.tokenizer is None:
            return None
        lists = self.turns["suffix_ids"], self.turns["output_ids"]
        ids = (pc.unique(pc.list_flatten(one)).to_pylist() for one in lists)
        return token_pieces(self.tokenizer, [*{*chain(*ids)}])


def selected(
    batches: Iterable[pa.RecordBatch],
    *,
    ids: Sequence[str] | None = None,
    sample: int | None = None,
) -> tuple[pa.Table, int]:
    """The turns of chosen sessions in delta form, and the number of all sessions.

    At most one of the choices is given: ids, or a sample, drawn by a hash of the ids, so it
    is the same in every run.
    """
    n_sessions, parts = 0, list[pa.Table]()
    for table in whole_sessions(batches):
        n_sessions += pc.count_distinct(table["session_id"]).as_py()
        parts.append(compact(table if ids is None else _only(table, ids)))
    turns = pa.concat_tables(parts) if parts else TURNS_DELTA.empty_table()
    names = pc.unique(turns["session_id"]).to_pylist()
    for name in ids or ():
        if name not in names:
            raise UnknownSessionError(f"the turns have no session {name!r}")
    if sample is not None:
        draw = {name: blake2b(name.encode(), digest_size=8).digest() for name in names}
        turns = _only(turns, sorted(names, key=draw.__getitem__)[:sample])
    return turns, n_sessions


def _only(turns: pa.Table, names: Sequence[str]) -> pa.Table:
    return turns.filter(pc.is_in(turns["session_id"], pa.array(names, pa.string())))


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
    names, numbers = ("session_id", "row_index"), dict[Any, int]()
    if {*names} <= {*rows.column_names}:
        numbers = {key: k for k, key in enumerate(tuples(rows, *names))}
    found: Violations = {}
    for line in verify(rows, turns, policy, sessions=sessions).to_pylist():
        own = found.setdefault(line["session_id"], [])
        k = numbers.get((line["session_id"], line["row_index"]))
        shown: dict[str, Any] = {"ids": None}
        if k is not None and len(own) < _N_VIOLATIONS:
            ids, mask = (rows[name][k].values for name in ("input_ids", "loss_mask"))
            # a mask may cover the response only
            bits = np.pad(np.array(mask, np.bool_), (len(ids) - len(mask), 0))
            first = max((line["token"] or 0) - _AROUND, 0)
            around = slice(first, first + 2 * _AROUND + 1)
            shown = {"start": first, "ids": ids[around].to_pylist()}
            shown["mask"] = bits[around].tolist()
        own.append(line | shown)
    return found


def messages_of(turns: pa.Table, text: bool) -> dict[str, list[Any]]:
    """The distinct messages of a session, and the numbers of those of each turn.

    A message is its role and its JSON, which is null if unknown or not wanted.
    """
    # by key: role, body, number
    known: dict[bytes, list[Any]] = {}

    def number(message: dict[str, Any] | None) -> int | None:
        if message is None:
            return None
        own = known.setdefault(message["key"], [message["role"], None, len(known)])
        if text and message["body"] is not None:
            own[1] = message["body"]
        return int(own[2])

    lists = turns["suffix_messages"].to_pylist()
    return {
        "suffix_messages": [one and [number(of) for of in one] for one in lists],
        "response": [number(of) for of in turns["response"].to_pylist()],
        "messages": [one[:2] for one in known.values()],
    }


def _token_columns(turns: pa.Table) -> pa.Table:
    """The columns of a chunk's Arrow stream: base turns as indices, token columns."""
    columns = {"base": pc.index_in(turns["base_turn"], turns["turn_index"])}
    lengths = pc.list_value_length(turns["output_ids"])
    for name, type_ in zip(turns.schema.names, turns.schema.types, strict=True):
        wanted = name in _AS_THEY_ARE
        # a number per sampled token, such as an entropy or an advantage
        is_list = isinstance(type_, pa.ListType | pa.LargeListType)
        if not wanted and is_list and pa.types.is_floating(type_.value_type):
            own = pc.list_value_length(turns[name]).cast(pa.int64())
            wanted = pc.all(pc.equal(own, lengths)).as_py()
        if wanted:
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
    more = " No token of a reply that drifted is then trained." * policy.absorbs
    if policy.absorbs and policy.keep_prefix:
        more = " A reply that drifted is then trained up to the drift."
    return f"Where a prompt drifts: {rule[0].lower()}{rule[1:]}{more}"


def token_pieces(tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """Columns of the tokens: id, text, bytes in hexadecimal, whether it is special.

    Of text and bytes one is null: bytes are given for a token that is not text on its
    own, because it begins or ends inside a character.
    """
    codec, ids = Codec(tokenizer), sorted(ids)
    special = codec.special(np.array(ids, np.int32)).astype(int).tolist()
    pieces = [*map(codec.piece, ids)]
    texts = [one if isinstance(one, str) else None for one in pieces]
    hexes = [one.hex() if isinstance(one, bytes) else None for one in pieces]
    return {"id": ids, "text": texts, "hex": hexes, "special": special}


def packed(value: object) -> bytes:
    """A JSON value, compressed."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)
