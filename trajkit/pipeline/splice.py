"""Calls whose paths are spliced rows (_native/plan/splice.pxi)."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.ragged import Longs, Records, offsets_of
from trajkit.pipeline.payloads import PathRanges
from trajkit.policies import Policy
from trajkit.turns.sessions import Sessions
from trajkit.turns.structs import CALL, LINK

ENDED = ("stop", "tool_calls", "stop_sequence")
"""Values of finish_reason after which an output ends with its end of turn, as in Polar's
https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/93a0f75/src/polar/trajectory/builder/prefix_merging.py."""


@dataclass(frozen=True, slots=True)
class Spliced:
    """Sessions whose prompts are what the row has before their outputs."""

    sessions: Sessions
    # dtype LINK, shape (n_calls,): to the previous call of the row
    links: Records
    # shape (n_calls,): where in its recorded prompt the row's part begins; -1: in no row
    starts: Longs
    # shape (n_calls,): the row begins with the recorded prompt
    whole: npt.NDArray[np.bool_]

    def ranges(self, rows: Records) -> PathRanges:
        """The ranges of rows that are ranges of recorded prompts.

        Prompts that a row starts with come before the parts that were spliced in.
        """
        offsets = offsets_of(rows["n_calls"])
        call = np.empty(int(offsets[-1]), np.int32)
        numbers = np.arange(len(self.links), dtype=np.int32)
        _core.list_turns(rows, self.links, numbers, offsets, call)
        row = np.repeat(np.arange(len(rows)), np.diff(offsets))
        start, n_tokens = self.starts[call], rows["n_tokens"][row]
        parent = self.links["parent"][call]
        calls, before = self.sessions.calls, self.sessions.path_len
        place = np.where(parent < 0, 0, before[parent])
        length = calls["prompt_len"][call] - place
        inside = np.clip(n_tokens - place, 0, length)
        found = np.stack([row, place, call, start, inside])
        # until the first call whose prompt has its row in other tokens
        other = np.cumsum((parent >= 0) & ~self.whole[call])
        heads = (parent >= 0) & (other == other[offsets[:-1]][row])
        zero = np.zeros_like(row)
        shown = np.stack([row, zero, call, zero, np.minimum(place, n_tokens)])
        return PathRanges(*np.hstack([shown[:, heads], found]).astype(np.int64))


def splice(calls: Sessions, links: Records, policy: Policy) -> Spliced:
    """Splice the calls of links whose ``lcp`` is known."""
    n_calls = len(calls.calls)
    spliced, own_links = np.empty(n_calls, CALL), np.empty(n_calls, LINK)
    starts = np.empty(n_calls, np.int64)
    token = policy.end_of_turn_token_id
    ids = _core.splice_calls(
        calls.forest.paths,
        links,
        -1 if token is None else token,
        ended(calls),
        starts,
        spliced,
        own_links,
    )
    before = calls.path_len[links["parent"]]
    whole = (links["lcp"] == before) & (before == starts)
    made = replace(calls, calls=spliced, held=(*calls.held, ids))
    return Spliced(made, own_links, starts, whole)


def ended(calls: Sessions) -> npt.NDArray[np.uint8]:
    """Whether the engine said that a call's output ended its turn, shape (n_calls,)."""
    reasons = calls.table.column("finish_reason")
    known = pc.is_in(reasons, value_set=pa.array(ENDED))
    flags: npt.NDArray[np.bool_] = known.to_numpy()
    return flags.astype(np.uint8)
