"""The log, full and in delta form: what it holds, and what can happen to a process."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from benchmarks import crash
from tests.shim.clients import read_log
from tests.shim.fakes import FULL, cases, full_disk, remember, said, user
from trajkit import schema
from trajkit_shim.chat.request import logged_message
from trajkit_shim.prompting.conversation import Budget, Conversation
from trajkit_shim.sessions.turn_log import (
    DELTA_LOG_SCHEMA,
    LOG_SCHEMA,
    TurnLog,
)

WHEN = datetime(2026, 1, 2, tzinfo=UTC)


def turn(**changes):
    return {
        "session_id": "s",
        "request_id": "r",
        "model": "m",
        "prompt_ids": np.array([1, 2], np.int32),
        "output_ids": np.array([3], np.int32),
        "output_logprobs": np.array([-0.5], np.float32),
        "finish_reason": "stop",
        "messages": [logged_message({"role": "user", "content": "x"})],
        "response": logged_message({"role": "assistant", "content": "y"}),
        "use_tool": False,
        "ill_formed": False,
        "trainable": True,
        "weight_versions": [{"version": "v", "start": 0, "stop": 1}],
        "sampling": "{}",
        "cached_tokens": None,
        "started_at": WHEN,
        "ended_at": WHEN,
        "delta": (None, 0, 0),
        **changes,
    }


@pytest.fixture
def log(tmp_path):
    log = TurnLog(tmp_path)
    yield log
    log.close()


def test_what_is_written_is_read_and_valid(tmp_path):
    log = TurnLog(tmp_path / "run", fsync=True, images=True, attributed=True)
    written = set()
    log.append(turn(messages=turn()["messages"] * 2), 0, written)
    unknown = dict.fromkeys(["output_logprobs", "response", "weight_versions"])
    nothing = np.array([], np.int32)
    log.append(turn(output_ids=nothing, trainable=False, **unknown), 1, written)
    log.close()
    table = read_log(log.path)
    assert table.schema.equals(LOG_SCHEMA, check_metadata=True)
    tk.validate(table)
    first, second = table.to_pylist()
    bodies = [message["body"] for message in first["messages"]]
    assert bodies == ['{"content":"x","role":"user"}', None]
    assert first["response"]["role"] == "assistant"
    assert first["weight_versions"] == [{"version": "v", "start": 0, "stop": 1}]
    assert first["started_at"] == WHEN
    assert second["messages"][0]["body"] is None
    assert second["messages"][0]["key"] == first["messages"][0]["key"]
    assert second["output_ids"] == []
    assert {name: second[name] for name in unknown} == unknown


@pytest.mark.parametrize("stem", ["turns", "amendments", "sessions"])
def test_a_log_is_never_written_over(tmp_path, stem):
    (tmp_path / f"{stem}-00000.arrows").touch()
    with pytest.raises(FileExistsError, match="continues no log: choose another"):
        TurnLog(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_half_way_leaves_the_log_as_it_was(log, monkeypatch):
    log.append(turn(), 0, set())
    before, write = log.path.read_bytes(), os.write
    answers = [lambda file, data: write(file, data[:100]), FULL]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *given: answers.pop(0)(*given))
        with pytest.raises(OSError, match="No space left"):
            log.append(turn(), 1, set())
    assert (answers, log.path.read_bytes() == before) == ([], True)
    with monkeypatch.context() as patch:
        # a short write is finished
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        log.append(turn(), 1, set())
    assert read_log(log.path)["turn_index"].to_pylist() == [0, 1]


# What a disk does


def test_every_batch_and_every_new_name_is_flushed_to_disk(tmp_path, monkeypatch):
    sizes, names, fsync = {}, [], os.fsync

    def noted(file):
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_dir():
            names.extend(one.name for one in path.iterdir())
        else:
            sizes[path.name] = path.stat().st_size
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    log = TurnLog(tmp_path, fsync=True)
    for write, stem in (
        (lambda: log.append(turn(), 0, set()), "turns"),
        (lambda: log.append(turn(), 1, set()), "turns"),
        (lambda: log.amend("s", [0], "dropped", False), "amendments"),
    ):
        write()
        path = tmp_path / f"{stem}-00000.arrows"
        assert sizes[path.name] == path.stat().st_size
        # its folder was flushed once the file was in it
        assert path.name in names
    log.close()


def test_a_log_that_cannot_begin_leaves_no_file(tmp_path):
    with full_disk(), pytest.raises(OSError, match="No space left"):
        TurnLog(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_does_not_close_has_all_its_turns(tmp_path, monkeypatch):
    """Some network file systems report a full disk there, after all was written."""
    log, close = TurnLog(tmp_path), os.close
    log.append(turn(), 0, set())
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lambda file: FULL(close(file)))
        log.close()
    with pytest.raises(OSError, match="closed"):
        log.amend("s", [0], "dropped", False)
    assert tk.read_turns(tmp_path)["turn_index"].to_pylist() == [0]
    assert len(list(tmp_path.iterdir())) == 1


@cases(
    "column, option",
    {
        "tools": ({"message_tool_names": [None]}, "attributed=False"),
        "experts": ({"routed_experts": np.zeros((2, 2, 3), "i2")}, "routed_experts"),
        "masks": ({"sampling_mask": [[1], [2]]}, "sampling_masks=False"),
    },
)
@pytest.mark.parametrize("form", ["full", "delta"])
def test_a_column_that_a_log_leaves_out_is_not_lost_in_silence(
    tmp_path, form, column, option
):
    log = TurnLog(tmp_path, form=form)
    log.append(turn(), 0, set())
    with pytest.raises(ValueError, match=option):
        log.append(turn(**column), 1, set())
    log.close()
    turns = tk.read_turns(tmp_path)
    assert turns.num_rows == 1
    shown = schema.ATTRIBUTION.names[2:]
    assert not set(shown) & set(turns.column_names)
    assert set(LOG_SCHEMA.names) - set(shown) <= set(tk.expand(turns).column_names)


def replaced(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@cases(
    "change, says",
    {
        "emptied": (lambda path: os.truncate(path, 0), "0 bytes, but"),
        "removed": (os.unlink, "was removed"),
        "replaced": (replaced, "another file"),
        "longer": (lambda path: os.truncate(path, 10**6), "were written"),
    },
)
def test_a_log_that_another_program_changes_takes_no_turn(log, change, says):
    written = set()
    log.append(turn(), 0, written)
    change(log.path)
    for number in (1, 2):
        with pytest.raises(OSError, match=f"another program changed the log: .*{says}"):
            log.append(turn(), number, written)
    # its amendments are another file
    log.amend("s", [0], "dropped", False)


def test_the_log_can_be_imported_without_linux_s_socket_options():
    code = "import socket; del socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE\n"
    code += "import trajkit_shim.sessions.turn_log, trajkit_shim.engines.http\n"
    code += "import trajkit_shim.serve\n"
    subprocess.run([sys.executable, "-c", code], check=True)


# The delta form: the same turns, in what each of them adds

ids = st.lists(st.integers(0, 1), max_size=6).map(lambda x: np.array(x, np.int32))
texts = st.sampled_from(["x", "y"])
# what is asked, and the length of an earlier conversation that it continues
logged = st.lists(
    st.tuples(texts, texts, st.integers(0, 8), ids.filter(len), ids), max_size=8
)


def written(directory, form, calls):
    """The table of a log of these calls, all of one session."""
    log, session = TurnLog(directory, form=form, attributed=True), Conversation()
    budget, talk = Budget(1 << 40), []
    for index, (asked, answer, kept, prompt, output) in enumerate(calls):
        talk = [*talk[:kept], user(asked)]
        restored, reply = session.restore(talk), said(answer)
        each = turn(
            prompt_ids=prompt,
            output_ids=output,
            output_logprobs=None,
            weight_versions=None,
            messages=restored.logged,
            response=logged_message(reply),
            prompt_message_index=np.full(len(prompt), -1, np.int32),
            delta=session.delta(restored, prompt),
        )
        log.append(each, index, session.logged)
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
    assert full.num_rows == delta.num_rows == len(calls)
    if calls:
        tk.validate(delta)
        assert tk.expand(delta).select(full.column_names).equals(full)


def test_attribution_of_the_last_tokens(tmp_path):
    log, bodies = TurnLog(tmp_path, form="delta", attributed=True), set()
    log.append(turn(), 0, bodies)
    prompt, index = np.array([1, 2, 3], np.int32), np.array([-1, 1], np.int32)
    longer = turn(prompt_ids=prompt, prompt_message_index=index, delta=(0, 2, 1))
    log.append(longer, 1, bodies)
    log.close()
    written = read_log(log.path)
    assert written["prompt_message_index"].to_pylist() == [None, [-1, 1]]
    assert written["prompt_is_content"].to_pylist() == [None, [False, True]]


def test_a_write_that_fails_is_no_base(tmp_path):
    log = TurnLog(tmp_path / "run", form="delta", images=True, attributed=True)
    bodies = set()
    log.append(turn(), 0, bodies)
    new = logged_message({"role": "user", "content": "new"})
    longer = turn(messages=[*turn()["messages"], new], delta=(0, 2, 1))
    with full_disk(), pytest.raises(OSError, match="No space"):
        log.append(longer, 1, bodies)
    assert new.key not in bodies
    log.append(longer, 1, bodies)
    log.close()
    table = read_log(log.path)
    assert table.schema.equals(DELTA_LOG_SCHEMA, check_metadata=True)
    tk.validate(table)
    assert table["base_turn"].to_pylist() == [None, 0]
    assert table["suffix_ids"].to_pylist() == [[1, 2], []]
    assert table["suffix_messages"].to_pylist()[1][0]["body"] == new.body


def test_a_killed_gateway_keeps_every_acknowledged_turn(tmp_path):
    """``benchmarks.crash`` kills it under load, as often as is asked."""
    kills = int(os.environ.get("TRAJKIT_KILLS", "5"))
    *_, outcome = crash.run(kills, seed=1, directory=tmp_path)
    assert (outcome.wrong, outcome.kills) == ([], kills)
    assert outcome.acknowledged > 10 * kills
    assert outcome.logged >= outcome.acknowledged
    assert outcome.finished > 0
    assert outcome.resumed > 0
