"""Rows, spans and reports agree with the slow twins, and with what rows promise."""

from contextlib import ExitStack
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import linearized, link_by, replaced, turns_table
from tests.rows.test_twins import SAME_ANSWER_TWICE
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.policies import PRESETS
from trajkit.schema import REPORT, ROWS
from trajkit.tables import limits


def with_dirty_memory():
    """Give kernels memory that was used before."""

    def empty(size, dtype, real=np.empty):
        memory = real(size, dtype)
        memory.view(np.uint8)[:] = 0xFF
        return memory

    def allocate(n_bytes, real=pa.allocate_buffer):
        buffer = real(n_bytes)
        np.frombuffer(buffer, np.uint8)[:] = 0xFF
        return buffer

    stack = ExitStack()
    stack.enter_context(mock.patch("pyarrow.allocate_buffer", allocate))
    stack.enter_context(mock.patch("trajkit._core.empty", empty))
    return stack


LOGPROBS_OF_EVERY_KIND = [
    {"prompt_ids": [1], "output_ids": [5, 6], "output_logprobs": given}
    for given in ([-1.0, None], None, [None, -1.0], [None, None], [-1.0, -2.0])
]


@pytest.mark.parametrize("name", [*PRESETS, "null_row"])
@pytest.mark.parametrize("past_caches", [False, True])
def test_no_value_of_a_row_depends_on_what_its_memory_held(name, past_caches):
    """Outputs and prompts end anywhere in a line of a cache; a null logprob has 0.0."""
    policy = name if name in PRESETS else tk.policy("strict", missing_logprobs=name)
    most = 0 if past_caches else limits.STREAMING_STORE_TOKENS
    for turns in (LOGPROBS_OF_EVERY_KIND, generated_runs(20, seed=4, longest=60)):
        table = turns_table(turns)
        for form in (table, tk.compact(table)):
            with (
                mock.patch.object(limits, "STREAMING_STORE_TOKENS", most),
                with_dirty_memory(),
            ):
                rows = tk.linearize(form, policy)
            assert rows == tk.linearize(table, policy)
            assert not bytes_of_nulls(rows).any()


def bytes_of_nulls(rows):
    """What stands in memory where there is no logprob."""
    values = rows["logprobs"].combine_chunks().flatten()
    start, stop = values.offset, values.offset + len(values)
    held = np.frombuffer(values.buffers()[1] or b"", np.float32)[start:stop]
    return held[np.asarray(values.is_null())]


def test_a_drift_table_may_not_claim_what_two_turns_do_not_share():
    """Else tokens that were never sampled would stand under the mask."""
    table = turns_table(
        [
            {"prompt_ids": [1, 2], "output_ids": [3, 4]},
            {"prompt_ids": [1, 2, 3, 9, 5], "output_ids": [6]},
        ]
    )
    links = link_by(table, "previous")
    drift = tk.classify_drift(table, links)

    def with_lcp(lcp):
        return replaced(drift, "lcp", [lcp])

    rows = tk.linearize(table, "trl", links=links, drift=with_lcp(2))
    assert rows["loss_mask"].to_pylist() == [[False] * 5 + [True]]
    for lcp in (4, -1):
        with pytest.raises(InvalidTurnsError, match=rf"lcp {lcp}.*shares 3 tokens"):
            tk.linearize(table, "trl", links=links, drift=with_lcp(lcp))


def test_a_row_that_was_cut_within_a_reply_shares_what_it_has():
    """By a drift table, the removed call replaced more of the reply than rows show."""
    table = turns_table(
        [
            {"prompt_ids": [1], "output_ids": [2, 3, 4, 5]},
            {"prompt_ids": [1, 2, 3, 4, 9, 9, 9], "output_ids": [7]},
            {"prompt_ids": [1, 2, 3, 4, 5, 8], "output_ids": [6]},
        ]
    )
    policy = tk.policy("strict", truncate_at="calls", keep_prefix=True)
    policy = tk.policy(policy, on_drift="absorb_short_drift", fork_threshold=9)
    links = link_by(table, "previous")
    links = replaced(links, "parent", pa.array([None, 0, 0], pa.int32()))
    drift = replaced(tk.classify_drift(table, links), "lcp", [3, 5])
    given = {"links": links, "drift": drift, "max_row_tokens": 7}
    rows = tk.validate(tk.linearize(table, policy, **given))
    assert rows["input_ids"].to_pylist() == [[1, 2, 3], [1, 2, 3, 4, 5, 8, 6]]
    assert rows["shared_length"].to_pylist() == [0, 3]


def test_a_threshold_of_none_is_the_preset_s_own():
    other = tk.policy("slime", fork_threshold=5)
    assert tk.policy(other, fork_threshold=None) == tk.policy("slime")
    assert tk.policy(other, merge_rewrites=False).fork_threshold == 5


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        pytest.param([{"session_id": "s"}], "dict is not a record batch", id="a dict"),
        pytest.param([pa.record_batch({"x": [1]})], "'session_id'", id="no session"),
        pytest.param(
            [
                pa.record_batch({"session_id": ["s"], "turn_index": ["1"]}),
                pa.record_batch({"session_id": ["s"], "turn_index": [1]}),
            ],
            "do not make one table",
            id="types that change",
        ),
    ],
)
def test_what_is_no_stream_of_turns_is_refused(pieces, match):
    with pytest.raises(SchemaError, match=match):
        list(tk.linearize_batches(iter(pieces), "slime"))


@pytest.mark.parametrize("name", PRESETS)
def test_no_turns_give_no_rows(name):
    none = turns_table(SAME_ANSWER_TWICE).slice(0, 0)
    rows, report = linearized(none, name)
    assert tk.verify(rows, none, name).num_rows == 0
    assert rows.num_rows == report.num_rows == 0
    assert rows.schema.equals(ROWS)
    assert report.schema.equals(REPORT)


def test_what_else_is_known_of_a_session_is_passed_over():
    table = turns_table(SAME_ANSWER_TWICE)
    names = sorted(set(table["session_id"].to_pylist()))
    known = {
        "agent_end": ["finished"] * len(names),
        "session_id": names,
        "reward": [1.5] * len(names),
    }
    facts = pa.table(known)
    rows, report = linearized(table, "slime", sessions=facts)
    assert report.schema.equals(REPORT)
    assert (rows, report) == linearized(table, "slime", reward=1.5)
    assert tk.verify(rows, table, "slime", sessions=facts).num_rows == 0
