"""Sessions of 50,000 turns: nothing recurses, nothing is quadratic in turns.

Lengths in tokens are another matter: each prompt is looked at once, whole.
"""

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.made_tables import link_by, replaced

N = 50_000
IDS = pa.large_list(pa.int32())


def line_of(n_turns):
    """A session in which each call continues the last by one token, one token is new.

    Call k has the prompt ``0 1 ... 2k`` and the output ``2k + 1``. In delta form: whole
    prompts would be quadratic.
    """
    at = np.arange(n_turns, dtype=np.int32)
    return pa.table(
        {
            "session_id": pa.repeat("s", n_turns),
            "turn_index": at,
            "base_turn": pa.array(at - 1, mask=at == 0),
            "shared_length": 2 * at,
            "suffix_ids": pa.array((2 * at)[:, None].tolist(), IDS),
            "output_ids": pa.array((2 * at + 1)[:, None].tolist(), IDS),
            "output_logprobs": pa.repeat(
                pa.scalar([-0.5], pa.large_list(pa.float32())), n_turns
            ),
            "finish_reason": pa.repeat("stop", n_turns),
        }
    )


@pytest.mark.parametrize("policy", ["slime", "strict"])
def test_a_clean_session_is_one_row(policy):
    rows = tk.linearize(line_of(N), policy)
    assert rows.num_rows == 1
    ids = rows["input_ids"].combine_chunks().flatten().to_numpy()
    mask = rows["loss_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    logprobs = rows["logprobs"].combine_chunks().flatten()
    assert np.array_equal(ids, np.arange(2 * N))
    assert np.array_equal(mask, np.arange(2 * N) % 2 == 1)
    assert logprobs.null_count == N
    assert len(rows["spans"][0]) == N


def test_every_turn_of_it_is_linked_to_the_one_before():
    turns = line_of(N)
    links = tk.link(turns)
    assert links["parent"].slice(1).to_pylist() == list(range(N - 1))
    assert links["order"].to_pylist() == list(range(N))
    drift = tk.classify_drift(turns, links)
    assert drift.num_rows == N - 1
    assert set(drift["size"].to_pylist()) == {0}


def test_a_line_of_refused_turns():
    """Each prompt repeats all that came before, of which the first call alone counts."""
    n = 10_000  # each prompt is compared with the first call's: quadratic by its nature
    turns = replaced(line_of(n), "finish_reason", ["length"] * n)
    links = link_by(turns, parent_by="generations")
    assert set(links["parent"].slice(1).to_pylist()) == {0}
    assert set(links["link_reason"].slice(1).to_pylist()) == {"refused_truncated"}


def test_a_tree_of_messages_as_deep():
    """One conversation of many messages, answered, then answered after one more."""
    talk = [
        {"role": "assistant" if k % 2 else "user", "content": str(k)} for k in range(N)
    ]
    reply = {"role": "assistant", "content": "reply"}
    more = {"role": "user", "content": "more"}
    records = [
        {
            "session_id": "s",
            "prompt_messages": messages,
            "response_message": reply,
            "prompt_ids": prompt,
            "output_ids": [7],
        }
        for messages, prompt in [
            (talk, [1]),
            ([*talk, reply, more], [1, 7, 2]),
            (talk[: N // 2], [1]),
        ]
    ]
    turns = tk.from_records(records)
    assert tk.link(turns)["parent"].to_pylist() == [None, 0, None]
    assert tk.link(turns)["order"].to_pylist() == [0, 1, 2]
    assert tk.linearize(turns, "slime")["input_ids"].to_pylist() == [
        [1, 7, 2, 7],
        [1, 7],
    ]


@pytest.mark.parametrize("route", ["tokens", "messages"])
@pytest.mark.parametrize("where", ["reply", "prompt"])
def test_a_line_in_which_every_turn_drifts(route, where):
    """Each prompt drops the end of what was held: no path is the start of another."""
    n = 10_000  # each prompt is compared with others: quadratic by its nature
    at = np.arange(n, dtype=np.int32)
    turns = pa.table(
        {
            "session_id": pa.repeat("s", n),
            "turn_index": at,
            "base_turn": pa.array(at - 1, mask=at == 0),
            "shared_length": np.where(at == 0, 0, 2 * at - (where == "prompt")),
            "suffix_ids": pa.repeat(
                pa.scalar([8] if where == "reply" else [7, 7, 8], IDS), n
            ),
            "output_ids": pa.repeat(pa.scalar([5, 6], IDS), n),
        }
    )
    links = link_by(turns, route)
    by_tokens = route == "messages" and where == "reply"
    before = at - 1 if by_tokens else np.full(n, -1)
    assert links["parent"].fill_null(-1).to_numpy().tolist() == before.tolist()
    assert links["order"].to_pylist() == list(range(n))
