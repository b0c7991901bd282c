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
from tests.shim.fakes import remember
from tests.shim.prompting.test_prompts import EMBEDDED, work
from tests.shim.sessions.test_turn_log import turn
from trajkit import cli
from trajkit_shim.chat.request import logged_message
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.prompting.conversation import Budget, Conversation
from trajkit_shim.sessions.turn_log import DELTA_LOG_SCHEMA, TurnLog

TEXT = (Path(__file__).parents[3] / "trajkit" / "policies.py").read_text()

ids = st.lists(st.integers(0, 1), max_size=6).map(lambda x: np.array(x, np.int32))
texts = st.sampled_from(["x", "y"])
# what is asked, and the length of an earlier conversation that it continues
logged = st.lists(
    st.tuples(texts, texts, st.integers(0, 8), ids.filter(len), ids), max_size=8
)


def written(directory, form, calls):
    """The table of a log of these calls, all of one session."""
    log, session = TurnLog(directory, form=form), Conversation()
    budget = Budget(1 << 40)
    talk = []
    for index, (asked, answer, kept, prompt, output) in enumerate(calls):
        talk = [*talk[:kept], {"role": "user", "content": asked}]
        restored = session.restore(talk)
        reply = {"role": "assistant", "content": answer}
        log.append(
            turn(
                prompt_ids=prompt,
                output_ids=output,
                output_logprobs=None,
                weight_versions=None,
                messages=restored.logged,
                response=logged_message(reply),
                prompt_message_index=np.full(len(prompt), -1, np.int32),
                delta=session.delta(restored, prompt),
            ),
            index,
            session.logged,
        )
        path = np.concatenate([prompt, output])
        remember(session, restored.position, reply, budget, ids=path, turn=index)
        talk = [*talk, reply]
    log.close()
    return tk.read_turns(directory)


@given(logged)
def test_a_delta_log_is_the_full_log(tmp_path_factory, calls):
    full, delta = (
        written(tmp_path_factory.mktemp("log"), form, calls)
        for form in ("full", "delta")
    )
    if not calls:
        assert (full.num_rows, delta.num_rows) == (0, 0)
        return
    tk.validate(delta)
    assert tk.expand(delta).select(full.column_names).equals(full)


def test_a_write_that_fails_is_no_base(tmp_path, monkeypatch):
    log = TurnLog(tmp_path / "run", form="delta", images=True)
    bodies = set()
    log.append(turn(), 0, bodies)

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    said = logged_message({"role": "user", "content": "new"})
    longer = turn(messages=[*turn()["messages"], said], delta=(0, 2, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            log.append(longer, 1, bodies)
    assert said.key not in bodies
    log.append(longer, 1, bodies)
    log.close()
    table = read_log(log.path)
    assert table.schema.equals(DELTA_LOG_SCHEMA, check_metadata=True)
    tk.validate(table)
    assert table["base_turn"].to_pylist() == [None, 0]
    assert table["suffix_ids"].to_pylist() == [[1, 2], []]
    assert table["suffix_messages"].to_pylist()[1][0]["body"] == said.body


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
    calls, held = [], np.empty(0, np.int32)
    for i in range(20):
        new, output = random.integers(0, 150_000, (2, 500), np.int32)
        begin = 2000 * i % 20_000
        prompt = np.concatenate([held, new])
        asked, said = (TEXT[begin + j : begin + j + 1500] for j in (0, 1))
        calls.append((asked, said, 2 * i, prompt, output))
        held = np.concatenate([prompt, output])
    full, _ = (written(tmp_path / form, form, calls) for form in ("full", "delta"))
    tk.write_turns(tk.compact(full), tmp_path / "compact.arrow")
    size = (tmp_path / "delta" / "turns-00000.arrows").stat().st_size
    assert size < 3 / 2 * (tmp_path / "compact.arrow").stat().st_size
