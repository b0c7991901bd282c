"""What routes share: the records of links, and where requests lie in forests.

Requests are paths of messages, as prompts are paths of tokens: a message's key of 16 bytes
is read as four tokens, so the kernel that grows the forest of token paths compares messages
too. A call's path is its messages and its reply.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import pyarrow as pa

from trajkit._kernel_names import CALL, LINK, numbers
from trajkit.errors import SchemaError
from trajkit.schema import KEY_BYTES, LINK_REASONS
from trajkit.tables.ragged import Ints, Longs, Records
from trajkit.turns.sessions import Forest, Sessions

REASONS: Mapping[str, int] = numbers("LinkReason", LINK_REASONS)
"""The number of each link reason in a record."""


def empty_links(calls: Sessions) -> Records:
    """A link of every call: a root, in no order."""
    links = np.zeros(len(calls.calls), LINK)
    for name in ("parent", "order", "rewritten_by"):
        links[name] = -1
    links["link_reason"] = REASONS["root"]
    return links


def first_of_session(calls: Sessions) -> Longs:
    """The first call of each call's session, shape (n_calls,)."""
    offsets = calls.offsets
    return np.repeat(offsets[:-1], np.diff(offsets))


def sessions_of(calls: Sessions) -> Iterator[range]:
    """The calls of each session."""
    offsets = calls.offsets.tolist()
    for start, stop in pairwise(offsets):
        yield range(start, stop)


def optional_column(calls: Sessions, name: str, type_: pa.DataType) -> list[object]:
    """The values of an optional column; empty where there is none."""
    if name not in calls.table.column_names:
        return []
    column = calls.table.column(name)
    if pa.types.is_null(column.type):
        return []
    try:
        values: list[object] = column.cast(type_).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {name!r} is {column.type}: expected {type_}"
        ) from error
    return values


KEY_TOKENS = KEY_BYTES // 4
"""Tokens of a message in a path."""


def grow_messages(calls: Sessions) -> Forest:
    """The forest of the calls' messages, which are equal if their keys are.

    A call without a list of messages has an empty path, and a call whose reply is not
    known ends with its last message.
    """
    requests = calls.requests
    listed = requests["n_keys"] >= 0
    replied = listed & (requests["reply_key"] != 0)
    paths = np.zeros(len(requests), CALL)
    paths["own"] = requests["keys"]
    paths["own_start"] = KEY_TOKENS * requests["shared"].astype(np.int64)
    paths["prompt_len"] = paths["own_start"] + np.where(
        listed, KEY_TOKENS * requests["n_keys"], 0
    )
    paths["out"] = requests["reply_key"]
    paths["out_len"] = np.where(replied, KEY_TOKENS, 0)
    paths["base"] = np.where(requests["shared"] > 0, calls.calls["base"], -1)
    return Forest.of(paths, calls.offsets)


def prompt_nodes(forest: Forest, prompt_len: Longs) -> Ints:
    """The node in which each call's prompt ends; equal prompts end in the same one."""
    nodes, at = forest.nodes, forest.ends.copy()
    beyond = np.flatnonzero(nodes["start"][at] >= prompt_len)
    while len(beyond):
        at[beyond] = nodes["parent"][at[beyond]]
        beyond = beyond[nodes["start"][at[beyond]] >= prompt_len[beyond]]
    return at


def nodes_within_prompts(forest: Forest, prompt_len: Longs) -> Ints:
    """The last node of each call's path that ends inside its prompt or with it.

    A path that is a prefix of the prompt ends there or above.
    """
    at = prompt_nodes(forest, prompt_len)
    whole = forest.nodes["stop"][at] <= prompt_len
    return np.where(whole, at, forest.nodes["parent"][at])
