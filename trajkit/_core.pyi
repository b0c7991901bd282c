"""The whole contract between trajkit/*.py and the compiled kernels.

Arrays are contiguous; records have the dtypes of trajkit/_kernel_names.py.
"""

from array import array
from typing import Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

_Records: TypeAlias = npt.NDArray[np.void]
_I8: TypeAlias = npt.NDArray[np.int8]
_I32: TypeAlias = npt.NDArray[np.int32]
_I64: TypeAlias = npt.NDArray[np.int64]
_U8: TypeAlias = npt.NDArray[np.uint8]
_F32: TypeAlias = npt.NDArray[np.float32]

# release, debug or sanitize
BUILD: str

# by the name of the struct
DTYPES: dict[str, np.dtype[np.void]]

# forest.pxi
def lcp(a: _I32 | array[int], b: _I32 | array[int]) -> int: ...

# text.pxi
def unbox_ids(values: list[object], out: _I32) -> int: ...
def unbox_logprobs(values: list[object], out: _F32, valid: _U8) -> int: ...
def json_value_end(text: bytes, at: int) -> int: ...
def json_shared(text: bytes, at: int, before: bytes, start: int, stop: int) -> int: ...
def json_ids(text: bytes, at: int, out: _I32) -> bool: ...

# arrow.pxi
def read_columns(
    table: object,
    session_offsets: _I64,
    turn_index: _I32,
    calls: _Records,
    requests: _Records,
) -> int: ...

# forest.pxi
@final
class CallForest:
    def __new__(cls, calls: _Records, session_offsets: _I64) -> Self: ...
    @property
    def arrays(self) -> tuple[_I64, _I32, _Records, _I32]: ...

def copy_ranges(
    forest: CallForest, calls: _I64, starts: _I64, offsets: _I64, out: _I32
) -> None: ...

@final
class Growth:
    def __new__(cls) -> Self: ...
    @property
    def n_calls(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def calls(self) -> _Records: ...
    def take(
        self,
        prompt: _I32,
        output: _I32,
        logprobs: _F32 | None,
        low: float,
        high: float,
    ) -> bytes: ...
    @property
    def fault(self) -> tuple[int, int, int] | None: ...
    def insert(
        self, trainable: bool, use_tool: bool, ill_formed: bool, stop: int
    ) -> tuple[int, int, bool]: ...

# route.pxi
def shared_length(forest: CallForest, call: int, other: int) -> int: ...
def measure_links(forest: CallForest, links: _Records) -> None: ...

@final
class TokenIndex:
    def __new__(cls, forest: CallForest) -> Self: ...
    def add(self, call: int) -> None: ...
    def find(self, call: int) -> int: ...

def route_messages(
    forest: CallForest,
    requests: _Records,
    tools: _I32 | None,
    merge_threshold: int,
    tie_break: int,
    links: _Records,
) -> None: ...
def route_chains(forest: CallForest, of_prompts: bool, links: _Records) -> _I32: ...

# text.pxi
def find_bodies(
    requests: _Records,
    session_offsets: _I64,
    has_body: _U8,
    reply_has_body: _U8,
    places: _I64,
    replies: _I64,
) -> None: ...

# drift.pxi
def describe_drift(
    forest: CallForest, links: _Records, min_run: int, out: _I64
) -> None: ...
def align(
    a: _I32, b: _I32, borders_a: _I32, borders_b: _I32, run: int, out: _I64
) -> int: ...

# rows.pxi
def order_calls(forest: CallForest, links: _Records) -> npt.NDArray[np.int32]: ...
def plan_rows(
    forest: CallForest, links: _Records, choices: _Records, created_rank: _I32
) -> tuple[_Records, _I32, _I64]: ...
def list_calls(rows: _Records, links: _Records) -> _I32: ...
def fill_rows(
    forest: CallForest,
    links: _Records,
    choices: _Records,
    owners: _I32,
    turn_index: _I32,
    rows: _Records,
    input_ids: _I32,
    loss_mask: _U8,
    logprobs: _F32,
    valid: _U8,
    uncached: bool,
) -> tuple[int, _I32, _I32, _I8]: ...

# packs.pxi
def fill_packs(
    rows: _Records, input_ids: _I32, position_ids: _I32, subtree_end: _I32
) -> None: ...
def count_edges(rows: _Records) -> tuple[int, _I64]: ...
def fill_edges(
    rows: _Records,
    input_ids: _I32,
    offsets: _I64,
    source: _I32,
    target: _I32,
    position: _I32,
    logprob: _F32,
    given: _U8,
) -> None: ...
