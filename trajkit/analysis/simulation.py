"""`simulate`: compare what policies keep, lose and cost on the same recorded calls."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

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
from trajkit.tables.stages import Batches, batches_of, whole_sessions
from trajkit.turns.flat_buffers import TurnTokens, flat_turns, sessions_of, spans_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import session_facts
from trajkit.turns.sessions import Sessions

ASKED = ("untrainable", "aborted", "masked", "no_logprob")
"""Losses that the caller asked for."""

Policies: TypeAlias = str | Policy | Iterable[str | Policy] | None


def simulate(
    turns: TableLike | Batches,
    policies: Policies = None,
    *,
    pad_to: int | None = None,
    pack_tokens: int | None = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    threads: int | None = None,
) -> pa.Table:
    """Count what policies keep, lose and cost on recorded calls, one row per policy.

    Parameters
    ----------
    turns : table, or iterator of record batches
        As for `trajkit.linearize`. One part of a run's rows is in memory at a time.
    policies : str, Policy, or iterable of them, optional
        Default: every preset. Without message bodies in the table, presets that compare
        them are omitted with a `LeftOutWarning`.
    pad_to : int, optional
        Count the padding of rows to a multiple of this many tokens.
    pack_tokens : int, optional
        Count the packs of at most this many tokens that the rows make as trees.
    sessions, max_row_tokens, threads
        As for `trajkit.linearize`; a session with an error trains nothing.

    Returns
    -------
    Table
        `trajkit.schema.SIMULATION`, in the order of ``policies``: counts of what
        `trajkit.linearize` returns for the same arguments.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As for `trajkit.linearize`, and with ``pack_tokens`` as for `trajkit.pack`.
    PolicyError, ArgumentError
        A policy does not exist, or ``pad_to`` or ``pack_tokens`` is no integer from 1 on.
    """
    counts = Simulation(
        policies, pad_to, pack_tokens, sessions, max_row_tokens, threads
    )
    if isinstance(turns, Iterator):
        for table in whole_sessions(batches_of(turns)):
            counts.add(table)
    else:
        counts.add(as_turns(turns))
    return counts.table()


@dataclass
class Simulation:
    """Incremental `simulate`, with its arguments: add sessions part by part."""

    policies: Policies = None
    pad_to: int | None = None
    pack_tokens: int | None = None
    sessions: TableLike | None = None
    max_row_tokens: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        chosen: Any = PRESETS if self.policies is None else self.policies
        chosen = [chosen] if isinstance(chosen, str | Policy) else chosen
        if not isinstance(chosen, Iterable):
            text = "expected policies, or names of policies"
            raise ArgumentError(f"policies={chosen!r}: {text}")
        counted = [*COUNTS, "tokens_out_of_context", "longest_row"]
        if self.pad_to is not None:
            chosen_int("pad_to", self.pad_to, 1)
            counted.append("tokens_padding")
        if self.pack_tokens is not None:
            chosen_int("pack_tokens", self.pack_tokens, 1)
            counted += ["packs", "tokens_packed", "pairs_packed"]
        self.sessions = session_facts(None, self.sessions).table
        self._totals = [
            (named_policy(one), dict.fromkeys(counted, 0)) for one in chosen
        ]

    def add(self, turns: pa.Table) -> None:
        """Count complete sessions. If they are rejected, the counts stay unchanged."""
        totals = [(policy, dict(counts)) for policy, counts in self._totals]
        for part in Sessions.of(turns).split(limits.PART_TOKENS):
            sampled = flat_turns(part)
            for total in tuple(totals):
                policy, counts = total
                try:
                    found = self._counted(sampled, policy)
                except MissingBodyError as error:
                    if self.policies is not None:
                        raise
                    left_out = f"{policy.name} is left out: {error}"
                    warnings.warn(left_out, LeftOutWarning, stacklevel=3)
                    totals.remove(total)
                    continue
                longest = max(counts["longest_row"], int(found["longest_row"]))
                for name in counts:
                    counts[name] += int(found[name])
                counts["longest_row"] = longest
        self._totals = totals

    def table(self) -> pa.Table:
        lines = [
            {
                "policy": label(policy),
                **counts,
                "tokens_lost": sum(counts[f"lost_{reason}"] for reason in LOSSES),
            }
            for policy, counts in self._totals
        ]
        return pa.Table.from_pylist(lines, SIMULATION)

    def _counted(self, sampled: TurnTokens, policy: Policy) -> dict[str, Any]:
        rows, report = rows_and_report(
            sampled.calls,
            policy,
            sessions=self.sessions,
            max_row_tokens=self.max_row_tokens,
            threads=self.threads,
        )
        found = {name: report[name].to_numpy().sum() for name in COUNTS}
        ids = Ragged.of(rows["input_ids"], -1)
        spans = spans_of(rows, sampled, sessions_of(rows, sampled.calls))
        trained = spans.take(np.flatnonzero(spans.kind == "trained"))
        beyond = trained.stop - trained.start - trained.in_context(ids, sampled)
        found["tokens_out_of_context"] = beyond.sum()
        found["longest_row"] = ids.lengths.max(initial=0)
        if self.pad_to is not None:
            found["tokens_padding"] = (-ids.lengths % self.pad_to).sum()
        if self.pack_tokens is not None:
            packs = pack(rows, self.pack_tokens, oversize="carry")
            found["packs"], found["pairs_packed"] = len(packs), pack_pairs(packs).sum()
            found["tokens_packed"] = packs["n_tokens"].to_numpy().sum()
        return found


def label(policy: Policy) -> str:
    """The policy's name and the choices that differ from its preset's, such as
    ``slime(fork_threshold=0)``; of a system's rule without a preset, the system's name.
    """
    preset = PRESETS[policy.name]
    for system, rule in ALIASES.items():
        if policy == rule != preset:
            return system
    values = ((one.name, getattr(policy, one.name)) for one in fields(policy))
    changed = [f"{k}={value}" for k, value in values if value != getattr(preset, k)]
    return f"{policy.name}({', '.join(changed)})".removesuffix("()")


def cheapest_lossless(table: pa.Table) -> str | None:
    """The lossless policy of a `simulate` table with the least cost, or None.

    It has the fewest forward tokens (on ties, with shared prefixes counted once), loses
    no token that may be trained, and trains none out of context.
    """
    costs = [
        (line["tokens_forward"], line["tokens_forward_shared"], k, line["policy"])
        for k, line in enumerate(table.to_pylist())
        if line["tokens_lost"] == sum(line[f"lost_{reason}"] for reason in ASKED)
        and not line["tokens_out_of_context"]
    ]
    return min(costs)[-1] if costs else None
