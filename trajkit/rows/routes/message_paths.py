"""The requests of calls as a forest: paths of messages, as prompts are paths of tokens.

A message's key of 16 bytes is read as four tokens, so the kernel that grows the forest of
token paths compares messages too. A call's path is its messages and its reply.
"""

import numpy as np

from trajkit.schema import KEY_BYTES
from trajkit.turns.sessions import Forest, Sessions
from trajkit.turns.structs import CALL

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
