"""The log in delta form: the same turns, in what each of them adds."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.shim.clients import in_process, read_log
from tests.shim.prompting.test_prompts import EMBEDDED, work
from tests.shim.sessions.test_turn_log import turn
from trajkit import cli
from trajkit_shim.chat.request import logged_message
from trajkit_shim.engines.base import WeightSpan
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.sessions.turn_log import DELTA_LOG_SCHEMA, TurnLog, WrittenTurns

TEXT = (Path(__file__).parents[3] / "trajkit" / "schema.py").read_text()

messages = st.lists(
    st.builds(
        lambda role, content: logged_message({"role": role, "content": content}),
        st.sampled_from(["user", "assistant"]),
        # equal keys with other bodies
        st.sampled_from(["x", "y", 1, 1.0]),
    ),
    max_size=4,
)
ids = st.lists(st.integers(0, 1), max_size=6).map(lambda x: np.array(x, np.int32))
logged = st.lists(
    st.tuples(
        st.sampled_from("ab"), ids.filter(len), ids, messages, st.none() | messages
    ),
    max_size=8,
)


def written(directory, form, calls):
    """The table of a log of these calls."""
    log = TurnLog(directory, form=form)
    sessions, n_turns = {}, {}
    for name, prompt, output, heard, said in calls:
        log.append(
            turn(
                session_id=name,
                prompt_ids=prompt,
                output_ids=output,
                output_logprobs=None,
                weight_versions=(),
                messages=heard,
                response=said[0] if said else None,
                prompt_message_index=np.full(len(prompt), -1, np.int32),
            ),
            n_turns.get(name, 0),
            sessions.setdefault(name, WrittenTurns()),
        )
        n_turns[name] = n_turns.get(name, 0) + 1
    log.close()
    return tk.read_turns(directory)


@given(logged)
def test_a_delta_log_is_the_full_log_compacted(tmp_path_factory, calls):
    full, delta = (
        written(tmp_path_factory.mktemp("log"), form, calls)
        for form in ("full", "delta")
    )
    if not calls:
        assert (full.num_rows, delta.num_rows) == (0, 0)
        return
    assert delta.select(DELTA_LOG_SCHEMA.names).equals(
        tk.compact(full).select(DELTA_LOG_SCHEMA.names)
    )
    assert tk.expand(delta).select(full.column_names).equals(full)


def test_a_write_that_fails_is_no_base(tmp_path, monkeypatch):
    log = TurnLog(tmp_path / "run", form="delta", images=True)
    book = WrittenTurns()
    log.append(turn(), 0, book)

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    longer = turn(prompt_ids=np.array([1, 2, 3, 4, 5], np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            log.append(longer, 1, book)
    log.append(longer, 1, book)
    log.append(longer, 2, book)
    log.close()
    table = read_log(log.path)
    assert table.schema.equals(DELTA_LOG_SCHEMA, check_metadata=True)
    tk.validate(table)
    assert table["base_turn"].to_pylist() == [None, None, 1]
    assert table["suffix_ids"].to_pylist() == [[1, 2], [1, 2, 3, 4, 5], []]
    assert table["shared_messages"].to_pylist() == [0, 0, 1]


@pytest.mark.anyio
async def test_a_delta_log_of_a_session_makes_the_same_rows(tmp_path):
    tables = {}
    for form in ("full", "delta"):
        engine = EmbeddedEngine(drift=0.3, seed=1)
        directory = tmp_path / form
        async with in_process(engine, EMBEDDED, directory, form=form) as gateway:
            await work(gateway, await gateway.open(session_id="a"), 10)
        tables[form] = tk.read_turns(directory)
    full, delta = tables["full"], tables["delta"]
    for policy in ("faithful", "slime"):
        rows = tk.linearize(delta, policy)
        assert rows.equals(tk.linearize(full, policy))
        assert tk.verify(rows, delta).num_rows == 0
    assert delta["base_turn"].to_pylist() == [None, *range(19)]
    for command in ("compact", "expand"):
        arguments = [command, str(tmp_path / "delta")]
        arguments += ["-o", str(tmp_path / f"{command}.parquet")]
        assert cli.main(arguments) == cli.DONE
    read = tk.read_turns(tmp_path / "expand.parquet")
    assert read["prompt_ids"].equals(full["prompt_ids"])


def test_a_delta_log_is_within_half_of_the_compact_form(tmp_path):
    """Turns of 500 tokens and the text of them."""
    random = np.random.default_rng(0)
    calls = []
    held, heard = np.empty(0, np.int32), []
    for i in range(20):
        new, output = random.integers(0, 150_000, (2, 500), np.int32)
        texts = TEXT[2000 * i % 20_000 :], TEXT[2000 * i % 20_000 + 1 :]
        asked, said = (
            logged_message({"role": role, "content": text[:1500]})
            for role, text in zip(("user", "assistant"), texts, strict=True)
        )
        prompt = np.concatenate([held, new])
        calls.append(("a", prompt, output, [*heard, asked], [said]))
        held, heard = np.concatenate([prompt, output]), [*heard, asked, said]
    full, _ = (written(tmp_path / form, form, calls) for form in ("full", "delta"))
    tk.write_turns(tk.compact(full), tmp_path / "compact.arrow")
    size = (tmp_path / "delta" / "turns-00000.arrows").stat().st_size
    assert size < 3 / 2 * (tmp_path / "compact.arrow").stat().st_size


def test_the_log_takes_little_more_than_the_table_that_it_is(tmp_path):
    """Turn by turn, with all that is known of each; compacted, Arrow's batch is one."""
    log = TurnLog(tmp_path, form="delta", attributed=False)
    rng, book = np.random.default_rng(0), WrittenTurns()
    held, talk = np.empty(0, np.int32), []
    for index in range(8):
        said = {"role": "user", "content": str(index)}
        talk = [*talk, logged_message(said)]
        new, output = (rng.integers(0, 150_000, n, np.int32) for n in (724, 300))
        prompt = np.append(held, new)
        call = turn(
            session_id="5f0c6c1e-3e53-4c4b-9a54-3a4b2f0e7a10",
            request_id=f"{index:032x}",
            model="org/some-model-8b",
            prompt_ids=prompt,
            output_ids=output,
            output_logprobs=-rng.random(300, np.float32),
            messages=talk,
            response=logged_message({"role": "assistant", "content": str(index)}),
            weight_versions=(WeightSpan("default", 0, 300),),
            sampling='{"max_new_tokens":4096,"temperature":1.0,"top_p":1.0}',
            cached_tokens=len(held),
            prompt_built="append",
            prompt_digest=rng.bytes(16),
            protocol="anthropic",
            harness="claude-code",
            agent_id="main",
            call_kind="agent",
        )
        log.append(call, index, book)
        held, talk = np.append(prompt, output), [*talk, call.response]
    log.close()
    turns = tk.read_turns(tmp_path)
    assert tk.compact(turns).equals(turns)
    [whole] = turns.combine_chunks().to_batches()
    written = log.path.stat().st_size - turns.schema.serialize().size
    assert written < 3 / 2 * whole.serialize().size
