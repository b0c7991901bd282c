"""The whole contract between trajkit/*.py and the compiled kernels."""

from collections.abc import Buffer  # type: ignore[attr-defined]

# release, debug or sanitize
BUILD: str

def lcp(a: Buffer, b: Buffer) -> int: ...
def unbox_ids(values: list[object], out: Buffer) -> int: ...
def unbox_logprobs(values: list[object], out: Buffer, valid: Buffer) -> int: ...
def encode_message(message: object) -> tuple[str, str]: ...
def match_messages(
    messages: list[object], before: list[object], before_ids: Buffer, ids: Buffer
) -> None: ...
def mark_shown(
    ids: Buffer,
    sessions: Buffer,
    key_of: Buffer,
    last_session: Buffer,
    last_id: Buffer,
    shown: Buffer,
) -> None: ...
def grow_forest(
    calls: Buffer,
    session_offsets: Buffer,
    path: Buffer,
    stack: Buffer,
    nodes: Buffer,
    ends: Buffer,
    shared: Buffer,
    shared_with: Buffer,
    state: Buffer,
    first_call: int,
) -> int: ...
def tree_size(
    requests: Buffer,
    session_offsets: Buffer,
) -> tuple[int, int]: ...
def route_messages(
    calls: Buffer,
    requests: Buffer,
    session_offsets: Buffer,
    nodes: Buffer,
    ends: Buffer,
    merge_threshold: int,
    by_tokens: bool,
    tree_nodes: Buffer,
    table: Buffer,
    places: Buffer,
    ended: Buffer,
    next_ended: Buffer,
    links: Buffer,
) -> None: ...
def route_tokens(
    calls: Buffer,
    session_offsets: Buffer,
    nodes: Buffer,
    ends: Buffer,
    active: Buffer,
    next_active: Buffer,
    row_of: Buffer,
    links: Buffer,
) -> None: ...
def measure_links(
    calls: Buffer,
    nodes: Buffer,
    ends: Buffer,
    links: Buffer,
) -> None: ...
def plan_rows(
    calls: Buffer,
    session_offsets: Buffer,
    nodes: Buffer,
    ends: Buffer,
    links: Buffer,
    absorb: int,
    threshold: int,
    keep_head: bool,
    drop_untrained: bool,
    chain_flags: bool,
    max_tokens: int,
    kinds: Buffer,
    scratch: Buffer,
    owners: Buffer,
    marks: Buffer,
    rows: Buffer,
    report: Buffer,
) -> int: ...
def fill_rows(
    calls: Buffer,
    nodes: Buffer,
    ends: Buffer,
    links: Buffer,
    kinds: Buffer,
    owners: Buffer,
    turn_index: Buffer,
    keep_head: bool,
    max_tokens: int,
    rows: Buffer,
    token_offsets: Buffer,
    span_offsets: Buffer,
    input_ids: Buffer,
    loss_mask: Buffer,
    logprobs: Buffer,
    valid: Buffer,
    spans: Buffer,
    span_kinds: Buffer,
) -> int: ...
def describe_drift(
    calls: Buffer,
    nodes: Buffer,
    ends: Buffer,
    links: Buffer,
    min_run: int,
    tails: Buffer,
    hashes: Buffer,
    starts: Buffer,
    out: Buffer,
) -> None: ...
