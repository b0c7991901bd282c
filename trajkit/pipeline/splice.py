"""Calls whose paths are spliced rows (_native/plan/splice.pxi)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow import lazy_compute as pc
from trajkit.pipeline.payloads import PathRanges
from trajkit.pipeline.plan import row_offsets
from trajkit.policies import Policy
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.prefix_forest import Forest, grow_paths
from trajkit.turns.structs import CALL, LINK

ENDED = ("stop", "tool_calls", "stop_sequence")
"""Values of finish_reason after which an output ends with its end of turn, as in Polar's
https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/93a0f75/src/polar/trajectory/builder/prefix_merging.py."""


@dataclass(frozen=True, slots=True)
class Spliced:
    """Calls whose prompts are what the row has before their outputs."""

    # dtype CALL, shape (n_calls,)
    calls: Records
    # dtype LINK, shape (n_calls,): to the previous call of the row
    links: Records
    # of ``calls``
    forest: Forest
    # shape (n_calls,): where in its recorded prompt the row's part begins; -1: in no row
    starts: Longs
    # shape (n_calls,): the row begins with the recorded prompt
    whole: npt.NDArray[np.bool_]
    # the tokens that ``calls`` refer to
    ids: Ints

    def ranges(self, rows: Records) -> PathRanges:
        """The ranges of rows that are ranges of recorded prompts.

        Prompts that a row starts with come before the parts that were spliced in.
        """
        offsets = row_offsets(rows)[2]
        call = np.empty(int(offsets[-1]), np.int32)
        numbers = np.arange(len(self.calls), dtype=np.int32)
        _core.list_turns(rows, self.links, numbers, offsets, call)
        row = np.repeat(np.arange(len(rows)), np.diff(offsets))
        start, n_tokens = self.starts[call], rows["n_tokens"][row]
        parent = self.links["parent"][call]
        before = self.calls["prompt_len"] + self.calls["out_len"]
        place = np.where(parent < 0, 0, before[parent])
        length = self.calls["prompt_len"][call] - place
        inside = np.clip(n_tokens - place, 0, length)
        found = np.stack([row, place, call, start, inside])
        # until the first call whose prompt has its row in other tokens
        other = np.cumsum((parent >= 0) & ~self.whole[call])
        heads = (parent >= 0) & (other == other[offsets[:-1]][row])
        zero = np.zeros_like(row)
        shown = np.stack([row, zero, call, zero, np.minimum(place, n_tokens)])
        return PathRanges(*np.hstack([shown[:, heads], found]).astype(np.int64))


def splice(calls: Calls, forest: Forest, links: Records, policy: Policy) -> Spliced:
    """Splice the calls of links whose ``lcp`` is known."""
    n_calls = len(calls.calls)
    spliced, own_links = np.empty(n_calls, CALL), np.empty(n_calls, LINK)
    starts = np.empty(n_calls, np.int64)
    token = policy.end_of_turn_token_id
    ids = _core.splice_calls(
        forest.paths,
        links,
        -1 if token is None else token,
        ended(calls),
        starts,
        spliced,
        own_links,
    )
    before = calls.path_len[links["parent"]]
    whole = (links["lcp"] == before) & (before == starts)
    grown = grow_paths(spliced, calls.session_offsets)
    return Spliced(spliced, own_links, grown, starts, whole, ids)


def ended(calls: Calls) -> npt.NDArray[np.uint8]:
    """Whether the engine said that a call's output ended its turn, shape (n_calls,)."""
    reasons = calls.table.column("finish_reason")
    known = pc.is_in(reasons, value_set=pa.array(ENDED))
    flags: npt.NDArray[np.bool_] = known.to_numpy()
    return flags.astype(np.uint8)
