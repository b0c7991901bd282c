"""What the page shows of some sessions: an index of them, and a chunk of bytes for each.

Everything is computed by the functions of `trajkit.analysis` and `trajkit.verify`. This
module only cuts their tables by session and encodes them.
"""

import gzip
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from trajkit import analysis
from trajkit.analysis.simulation import Simulation, label
from trajkit.analysis.tokenizer import Codec, Tokenizer, entry_bytes
from trajkit.analysis.words import LOSS_GROUPS, LOSS_WORDS, MENDS
from trajkit.errors import UnknownSessionError
from trajkit.policies import PRESETS, Policy, rule_of
from trajkit.rows.linearize import linearize, report
from trajkit.rows.links import link
from trajkit.schema import LOSSES, TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables.columns import row_lengths, take_session, tuples
from trajkit.tables.stages import whole_sessions
from trajkit.turns.delta import compact
from trajkit.turns.session_metadata import session_facts
from trajkit.verification.run import verify

# columns of turns that go into a chunk as they are, and those that the page shows as text
_AS_THEY_ARE = (
    "turn_index shared_length suffix_ids output_ids output_logprobs output_mask "
    "shared_messages weight_versions"
).split()
_SHOWN = "finish_reason trainable agent_id model started_at ended_at".split()
_OF_ROWS = "session_id row_index parent_row shared_length turns".split()
# violations of a session that are shown, and tokens before and after the first wrong one
_N_VIOLATIONS, _AROUND = 200, 8

Violations: TypeAlias = dict[str | None, list[dict[str, Any]]]
"""Lines of `trajkit.schema.VIOLATIONS` by session."""


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
        violations: Violations | None = None,
    ) -> None:
        self._turns = turns = compact(turns)
        self.session_ids: list[str] = pc.unique(turns["session_id"]).to_pylist()
        self._sessions, self._text = sessions, text
        self._tokenizer = tokenizer if text else None
        self._violations = violations
        self._policies = [*policies]
        # policies with the same parents share their links, which each has by number
        self._links: list[pa.Table] = []
        self._links_of: list[int] = []
        numbers: dict[object, int] = {}
        for policy in self._policies:
            links = link(turns, policy)
            parents = tuple(links["parent"].to_pylist())
            self._links_of.append(numbers.setdefault(parents, len(numbers)))
            if len(numbers) > len(self._links):
                self._links.append(links)
        # tables are made on first use
        self._table = cache(self._make)
        self._parts = cache(
            lambda *of: self._table(*of).partition_by("session_id", as_dict=True)
        )

    def _make(self, name: str, k: int) -> pl.DataFrame:
        """A table of the links, or of the policy, of this number."""
        turns, known = self._turns, self._sessions
        match name:
            case "drift":
                drift = pl.DataFrame(analysis.classify_drift(turns, self._links[k]))
                return drift.filter(pl.col("size") > 0)
            case "branches":
                made = analysis.label_branches(turns, self._links[k])
            case "findings":
                assert self._tokenizer is not None
                made = analysis.explain_drift(turns, self._links[k], self._tokenizer)
            case "report":
                made = report(turns, self._policies[k], sessions=known)
            case "spans":
                made = analysis.output_spans(turns, self._policies[k], sessions=known)
            case "rows":
                rows = linearize(turns, self._policies[k], sessions=known)
                reasons = pl.DataFrame(analysis.why(turns, self._policies[k]))
                return pl.DataFrame(rows.select(_OF_ROWS)).with_columns(
                    pl.Series("tokens", row_lengths(rows)),
                    reasons["tokens_trained"].alias("trained"),
                    reasons["sentence"],
                )
            case _:
                made = self._links[k]
        return pl.DataFrame(made)

    def _columns(self, names: Sequence[str], k: int, session_id: str) -> dict[str, Any]:
        """The lines of a session in some tables, as lists without its id."""
        columns: dict[str, Any] = {}
        for name in names:
            empty = self._table(name, k).clear()
            part = self._parts(name, k).get((session_id,), empty)
            columns[name] = part.drop("session_id").to_dict(as_series=False)
        return columns

    def index(self, title: str, n_runs: int = 1) -> dict[str, Any]:
        """What the page reads first: policies, drift by cause, and a line per session."""
        simulation = Simulation(self._policies, sessions=self._sessions)
        if self._turns.num_rows:
            simulation.add(self._turns)
        groups = [self._groups(k) for k in range(len(self._links))]
        found = self._violations
        rules = Counter(line["rule"] for own in (found or {}).values() for line in own)
        return {
            "title": title,
            "runs": n_runs,
            "losses": {name: LOSS_WORDS[name] for name in LOSSES},
            "groups": LOSS_GROUPS,
            "causes": MENDS,
            "text": self._text,
            "tokenizer": self._tokenizer is not None,
            "policies": simulation.table().to_pylist(),
            "rules": [rule_in_words(policy) for policy in self._policies],
            "drift": [groups[number] for number in self._links_of],
            "sessions": self.session_lines(),
            "violations": None if found is None else rules.most_common(),
        }

    def _groups(self, k: int) -> list[dict[str, Any]]:
        """Drift over all sessions by cause: counts and the first examples.

        Causes come from texts and every finding counts, or without a tokenizer from token
        ids, and every turn counts once.
        """
        drift, keys = self._table("drift", k), ["region", "cause"]
        turn, counted = ["session_id", "turn_index"], drift
        if self._tokenizer is not None:
            counted, keys = self._table("findings", k), ["cause"]
        return (
            counted.select(*turn, pl.col(*keys).cast(pl.String))
            .group_by(*keys, *turn, maintain_order=True)
            .agg(findings=pl.len())
            .join(
                drift.select(*turn, "tokens_after_drift"), turn, maintain_order="left"
            )
            .group_by(keys, maintain_order=True)
            .agg(
                pl.col("findings").sum(),
                turns=pl.len(),
                tokens=pl.col("tokens_after_drift").sum(),
                examples=pl.struct(turn).head(40),
            )
            .sort("findings", descending=True, maintain_order=True)
            .to_dicts()
        )

    def session_lines(self) -> dict[str, list[Any]]:
        """Columns of the list of sessions. Lists per policy are in the policies' order."""
        n_output = pl.col("output_ids").list.len()
        n_path = pl.col("shared_length") + pl.col("suffix_ids").list.len() + n_output
        names = ["session_id", "shared_length", "suffix_ids", "output_ids"]
        lines = pl.DataFrame(self._turns.select([*names, "output_logprobs"]))
        lines = lines.group_by("session_id", maintain_order=True).agg(
            turns=pl.len(),
            sampled=n_output.sum(),
            context=n_path.max(),
            logprob=pl.col("output_logprobs").explode().cast(pl.Float64).mean(),
        )
        drift = self._table("drift", 0).group_by("session_id")
        own = drift.agg(drifts=pl.len(), at_stake=pl.col("tokens_after_drift").sum())
        finite = pl.when(pl.col("logprob").is_finite()).then(pl.col("logprob"))
        columns = (
            lines.join(own, "session_id", how="left", maintain_order="left")
            .with_columns(finite, pl.col("drifts", "at_stake").fill_null(0))
            .to_dict(as_series=False)
        )
        ids = columns.pop("session_id")
        facts = session_facts(None, self._sessions).of(pa.array(ids, pa.string()))
        known = {name: facts[name].to_pylist() for name in ("reward", "error")}
        known |= {"id": ids, "group": facts["group_id"].to_pylist()}
        if self._violations is not None:
            known["violations"] = [len(self._violations.get(name, ())) for name in ids]
        # a list per session, with a number per policy
        reports = [self._table("report", k) for k in range(len(self._policies))]
        for name, counted in {"trained": "tokens_trained", "rows": "rows"}.items():
            numbers = zip(*(one[counted].to_list() for one in reports), strict=True)
            columns[name] = [*map(list, numbers)]
        return known | columns

    def chunk(self, session_id: str) -> bytes:
        """One session, compressed: a JSON object, then its turns as an Arrow IPC stream.

        The first four bytes (little endian) are the length of the JSON, which ends in
        spaces so that the stream begins at a multiple of 8 bytes.
        """
        turns = take_session(self._turns, session_id).combine_chunks()
        of_links = ["links", "drift", "branches"]
        of_links += ["findings"] * (self._tokenizer is not None)
        policies = []
        for k, policy in enumerate(self._policies):
            columns = self._columns(["rows", "spans", "report"], k, session_id)
            counts = ((name, n) for name, (n,) in columns["report"].items())
            columns["report"] = {name: n for name, n in counts if isinstance(n, int)}
            own = {"label": label(policy), "links": self._links_of[k], **columns}
            policies.append(own)
        found = None
        if self._violations is not None:
            found = self._violations.get(session_id, [])[:_N_VIOLATIONS]
        shown = [name for name in _SHOWN if name in turns.column_names]
        facts = {
            "id": session_id,
            "policies": policies,
            "links": [
                self._columns(of_links, k, session_id) for k in range(len(self._links))
            ],
            "turns": turns.select(shown).to_pydict(),
            **_messages(turns, self._text),
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

    def search(self, word: str) -> list[str]:
        """The sessions one of whose messages contains a word, in either case."""
        if not self._text:
            return []
        names = ["session_id", "suffix_messages", "response"]
        turns = pl.DataFrame(self._turns.select(names)).explode("suffix_messages")
        bodies = (pl.col(name).struct.field("body") for name in names[1:])
        hits = [
            one.str.to_lowercase().str.contains(word.lower(), literal=True)
            for one in bodies
        ]
        found = turns.filter(pl.any_horizontal(hits))["session_id"]
        return found.unique(maintain_order=True).to_list()

    def vocabulary(self) -> dict[str, Any] | None:
        """The text of every token that occurs; None without a tokenizer or text."""
        if self._tokenizer is None:
            return None
        lists = self._turns["suffix_ids"], self._turns["output_ids"]
        ids = (pc.unique(pc.list_flatten(one)).to_pylist() for one in lists)
        return token_pieces(self._tokenizer, [*{*chain(*ids)}])


def selected(
    batches: Iterable[pa.RecordBatch],
    *,
    ids: Sequence[str] | None = None,
    sample: int | None = None,
    worst: int | None = None,
    policy: Policy = PRESETS["faithful"],
) -> tuple[pa.Table, int]:
    """The turns of chosen sessions in delta form, and the number of all sessions.

    At most one of the choices is given: ids; a sample, drawn by a hash of the ids, so it
    is the same in every run; or the worst: those that lose most tokens under the policy,
    have the most sampled tokens after drift, or have the lowest mean logprob; each of the
    three rankings in turn names one.
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
    if worst is not None and names:
        lines = pl.DataFrame(ViewTables(turns, [policy]).session_lines())
        scores = (
            pl.col("sampled") - pl.col("trained").list.first(),
            pl.col("at_stake"),
            -pl.col("logprob").cast(pl.Float64).fill_null(0.0),
        )
        ranked = lines.select(
            pl.col("id")
            .sort_by(score, descending=True, maintain_order=True)
            .alias(f"{k}")
            for k, score in enumerate(scores)
        )
        taken = dict.fromkeys(name for line in ranked.iter_rows() for name in line)
        turns = _only(turns, [*taken][:worst])
    return turns, n_sessions


def _only(turns: pa.Table, names: Sequence[str]) -> pa.Table:
    chosen = pa.array(names, turns.schema.field("session_id").type)
    return turns.filter(pc.is_in(turns["session_id"], value_set=chosen))


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
        own.append(line | {"ids": None})
        k = numbers.get((line["session_id"], line["row_index"]))
        if k is not None and len(own) <= _N_VIOLATIONS:
            ids, mask = rows["input_ids"][k].values, rows["loss_mask"][k].values
            token = line["token"] or 0
            start, stop = max(token - _AROUND, 0), min(token + _AROUND + 1, len(ids))
            # a mask may cover the response only
            shift = len(ids) - len(mask)
            masked = [
                at >= shift and bool(mask[at - shift].as_py())
                for at in range(start, stop)
            ]
            shown = ids[start:stop].to_pylist()
            own[-1] |= {"start": start, "ids": shown, "mask": masked}
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
    rule, more = rule_of(policy, "on_drift"), ""
    if policy.absorbs:
        more = " No token of a reply that drifted is then trained."
        if policy.keep_prefix:
            more = " A reply that drifted is then trained up to the drift."
    return f"Where a prompt drifts: {rule[0].lower()}{rule[1:]}{more}"


def token_pieces(tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """Columns of the tokens: id, text, bytes in hexadecimal, whether it is special.

    Of text and bytes one is null: bytes are given for a token that is not text on its
    own, because it begins or ends inside a character.
    """
    codec, ids = Codec(tokenizer), sorted(ids)
    special = codec.special(np.array(ids, np.int32)).astype(int).tolist()
    columns: dict[str, list[Any]] = {
        "id": ids,
        "text": [],
        "hex": [],
        "special": special,
    }
    for token in ids:
        text, entry = codec.text([token]), codec.entry(token) or ""
        raw = entry_bytes(entry) if entry and "\ufffd" in text else None
        # SentencePiece writes a space as U+2581, and drops it at the start of a text
        spaced = entry.replace("\u2581", " ")
        if spaced.lstrip(" ") == text.lstrip(" "):
            text = spaced
        columns["text"].append(text if raw is None else None)
        columns["hex"].append(None if raw is None else raw.hex())
    return columns


def packed(value: object) -> bytes:
    """A JSON value, compressed."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)
