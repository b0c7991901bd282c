"""`simulate`: compare what policies keep, lose and cost on the same recorded calls."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int
from trajkit.errors import ArgumentError, LeftOutWarning, MissingBodyError
from trajkit.packs.balancing import pack_pairs
from trajkit.packs.packing import pack
from trajkit.policies import ALIASES, PRESETS, Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import rows_and_report
from trajkit.rows.plan import COUNTS
from trajkit.schema import LOSSES, SIMULATION
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Ragged
from trajkit.tables.session_batches import whole_sessions
from trajkit.tables.stages import Batches, batches_of
from trajkit.turns.flat_buffers import TurnTokens, flat_turns, sessions_of, spans_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import session_facts
from trajkit.turns.sessions import Sessions

_TRAINED = "trained"
_PACKED = ("packs", "tokens_packed", "pairs_packed")
# losses that the caller asked for
ASKED = ("untrainable", "aborted", "masked", "no_logprob")


def simulate(
    turns: TableLike | Batches,
    policies: str | Policy | Iterable[str | Policy] | None = None,
    *,
    pad_to: int | None = None,
    pack_tokens: int | None = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    threads: int | None = None,
) -> pa.Table:
    """Count what policies keep, lose and cost on recorded calls, one row per policy.

    All counts come from the tables that `trajkit.linearize` returns for the same
    arguments. Only one part of a run's rows is in memory at a time.

    Parameters
    ----------
    turns : table, or iterator of record batches
        As for `trajkit.linearize`.
    policies : str, Policy, or iterable of them, optional
        Default: every preset. If the table lacks message bodies (because rows were
        filtered, for instance), presets that compare bodies are omitted with a
        `LeftOutWarning`.
    pad_to : int, optional
        Count the padding of rows to a multiple of this many tokens.
    pack_tokens : int, optional
        Count the packs of at most this many tokens that the rows make as trees
        (`trajkit.pack`). Some sessions are packed at a time.
    sessions : table, optional
        `trajkit.schema.SESSIONS`; a session with an error trains nothing.
    max_row_tokens : int, optional
        As for `trajkit.linearize`.
    threads : int, optional
        As for `trajkit.linearize`.

    Returns
    -------
    Table
        `trajkit.schema.SIMULATION`, in the order of ``policies``.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As for `trajkit.linearize`, and with ``pack_tokens`` as for `trajkit.pack`.
    PolicyError, ArgumentError
        A policy does not exist, or ``pad_to`` or ``pack_tokens`` is not an integer of 1
        or more.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [
    ...         {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]},
    ...         {"session_id": "a", "prompt_ids": [1, 2, 9], "output_ids": [4]},
    ...     ]
    ... )
    >>> tk.simulate(turns, ["faithful", "trl"])["tokens_trained"].to_pylist()
    [3, 2]
    """
    counts = Simulation(
        policies, pad_to, pack_tokens, sessions, max_row_tokens, threads
    )
    if isinstance(turns, Iterator):
        tables: Iterable[pa.Table] = whole_sessions(batches_of(turns))
    else:
        tables = [as_turns(turns)]
    for table in tables:
        counts.add(table)
    return counts.table()


class Simulation:
    """Incremental `simulate`, with its arguments: add sessions part by part."""

    def __init__(
        self,
        policies: str | Policy | Iterable[str | Policy] | None = None,
        pad_to: int | None = None,
        pack_tokens: int | None = None,
        sessions: TableLike | None = None,
        max_row_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        if pad_to is not None:
            pad_to = chosen_int("pad_to", pad_to, 1)
        if pack_tokens is not None:
            pack_tokens = chosen_int("pack_tokens", pack_tokens, 1)
        if isinstance(policies, (str, Policy)):
            policies = [policies]
        if policies is not None and not isinstance(policies, Iterable):
            raise ArgumentError(
                f"policies={policies!r}: expected policies, or names of policies"
            )
        self._pad_to, self._pack_tokens = pad_to, pack_tokens
        chosen = map(named_policy, PRESETS if policies is None else policies)
        counted = (*COUNTS, "tokens_out_of_context", "longest_row")
        if pad_to is not None:
            counted += ("tokens_padding",)
        if pack_tokens is not None:
            counted += _PACKED
        self._totals = [(one, dict.fromkeys(counted, 0)) for one in chosen]
        self._any = policies is None
        self._facts = session_facts(None, sessions).table
        self._max_row_tokens, self._threads = max_row_tokens, threads

    def add(self, turns: pa.Table) -> None:
        """Count complete sessions. If they are rejected, the counts stay unchanged."""
        totals = [(policy, dict(counts)) for policy, counts in self._totals]
        calls = Sessions.of(turns)
        for part in calls.split(limits.PART_TOKENS):
            sampled = flat_turns(part)
            for total in tuple(totals):
                policy, counts = total
                try:
                    rows, report = rows_and_report(
                        part,
                        policy,
                        sessions=self._facts,
                        max_row_tokens=self._max_row_tokens,
                        threads=self._threads,
                    )
                except MissingBodyError as error:
                    if not self._any:
                        raise
                    left_out = f"{policy.name} is left out: {error}"
                    warnings.warn(left_out, LeftOutWarning, stacklevel=3)
                    totals.remove(total)
                else:
                    self._count(counts, rows, report, sampled)
        self._totals = totals

    def table(self) -> pa.Table:
        """The counts so far as `trajkit.schema.SIMULATION`."""
        lines = [
            {
                "policy": label(policy),
                **counts,
                "tokens_lost": sum(counts[f"lost_{reason}"] for reason in LOSSES),
            }
            for policy, counts in self._totals
        ]
        return pa.Table.from_pylist(lines, SIMULATION)

    def _count(
        self,
        counts: dict[str, int],
        rows: pa.Table,
        report: pa.Table,
        sampled: TurnTokens,
    ) -> None:
        """Add the rows that a policy made from the calls ``sampled``."""
        for name in COUNTS:
            counts[name] += int(report.column(name).to_numpy().sum())
        ids = Ragged.of(rows.column("input_ids"), -1)
        pieces = spans_of(rows, sampled, sessions_of(rows, sampled.calls))
        trained = pieces.take(np.flatnonzero(pieces.kind == _TRAINED))
        beyond = trained.stop - trained.start - trained.in_context(ids, sampled)
        counts["tokens_out_of_context"] += int(beyond.sum())
        longest = int(ids.lengths.max(initial=0))
        counts["longest_row"] = max(counts["longest_row"], longest)
        if self._pad_to is not None:
            counts["tokens_padding"] += int((-ids.lengths % self._pad_to).sum())
        if self._pack_tokens is not None:
            packs = pack(rows, self._pack_tokens, oversize="carry")
            n_tokens = packs.column("n_tokens").to_numpy().sum()
            found = packs.num_rows, n_tokens, pack_pairs(packs).sum()
            for name, n in zip(_PACKED, found, strict=True):
                counts[name] += int(n)


def label(policy: Policy) -> str:
    """The policy's name, and the choices that differ from its preset's.

    Of a system's rule that no preset has, the system's name.

    Examples
    --------
    >>> from trajkit.policies import policy
    >>> label(policy("slime", fork_threshold=0))
    'slime(fork_threshold=0)'
    """
    preset = PRESETS[policy.name]
    for system, one in ALIASES.items():
        if policy == one != preset:
            return system
    changed = [
        f"{field.name}={getattr(policy, field.name)}"
        for field in fields(policy)
        if getattr(policy, field.name) != getattr(preset, field.name)
    ]
    return f"{policy.name}({', '.join(changed)})" if changed else policy.name


def cheapest_lossless(table: pa.Table) -> str | None:
    """The lossless policy of a `simulate` table with the least cost, or None.

    It has the fewest forward tokens (on ties, with shared prefixes counted once), loses
    no token that may be trained, and trains none out of context.
    """
    lossless = [
        line
        for line in table.to_pylist()
        if line["tokens_lost"] == sum(line[f"lost_{reason}"] for reason in ASKED)
        and not line["tokens_out_of_context"]
    ]
    if not lossless:
        return None
    cost = min(
        lossless, key=lambda x: (x["tokens_forward"], x["tokens_forward_shared"])
    )
    return str(cost["policy"])
