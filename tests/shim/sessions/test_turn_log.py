"""The log: what it holds, and that it survives what can happen to a process."""

import errno
import os
import subprocess
import sys
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.shim.clients import read_log
from trajkit import schema
from trajkit.errors import TornLogWarning
from trajkit_shim.chat.request import logged_message
from trajkit_shim.sessions.turn_log import (
    END_OF_STREAM,
    LOG_SCHEMA,
    LogFullError,
    TurnLog,
)

ROOT = Path(__file__).parents[3]
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


def test_what_is_written_is_read_and_valid(tmp_path):
    log = TurnLog(tmp_path / "run", fsync=True, images=True)
    written = set()
    log.append(turn(), 0, written)
    log.append(
        turn(
            output_ids=np.array([], np.int32),
            output_logprobs=None,
            response=None,
            weight_versions=None,
            trainable=False,
        ),
        1,
        written,
    )
    log.close()
    table = read_log(log.path)
    assert table.schema.equals(LOG_SCHEMA, check_metadata=True)
    tk.validate(table)
    first, second = table.to_pylist()
    assert first["messages"][0]["body"] == '{"content":"x","role":"user"}'
    assert first["response"]["role"] == "assistant"
    assert first["weight_versions"] == [{"version": "v", "start": 0, "stop": 1}]
    assert first["started_at"] == WHEN
    assert second["messages"][0]["body"] is None
    assert second["messages"][0]["key"] == first["messages"][0]["key"]
    assert (second["output_ids"], second["output_logprobs"]) == ([], None)
    assert (second["response"], second["weight_versions"]) == (None, None)


def test_a_body_is_written_where_the_session_first_has_it(tmp_path):
    def saying(number):
        message = {"role": "user", "content": "x", "n": number}
        return turn(messages=[logged_message(message)] * 2, response=None)

    log = TurnLog(tmp_path)
    written = set()
    # messages that Python says are equal are one
    for index, number in enumerate([1, 1.0, 1.5, 1]):
        log.append(saying(number), index, written)
    table = read_log(log.path)
    bodies = [[m["body"] for m in t["messages"]] for t in table.to_pylist()]
    one, other = (
        '{"content":"x","n":1,"role":"user"}',
        '{"content":"x","n":1.5,"role":"user"}',
    )
    assert bodies == [[one, None], [None, None], [other, None], [None, None]]
    log.close()


def test_a_log_is_never_written_over(tmp_path):
    TurnLog(tmp_path).close()
    with pytest.raises(FileExistsError):
        TurnLog(tmp_path)


def test_a_write_that_fails_half_way_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log = TurnLog(tmp_path)
    log.append(turn(), 0, set())
    before = log.path.read_bytes()
    write = os.write
    written = []

    def full(file, data):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(file, data[:100]))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(turn(), 1, set())
    assert written == [100]
    assert log.path.read_bytes() == before
    log.append(turn(), 1, set())
    assert read_log(log.path)["turn_index"].to_pylist() == [0, 1]
    log.close()


def test_a_torn_last_turn_is_left_out_and_said_so(tmp_path):
    log = TurnLog(tmp_path / "whole")
    log.append(turn(), 0, set())
    good = log.path.stat().st_size
    log.append(turn(), 1, set())
    log.close()
    whole = log.path.read_bytes()[: -len(END_OF_STREAM)]
    torn = tmp_path / "turns-00000.arrows"
    for size in (*range(good + 1, len(whole), 301), len(whole) - 1):
        torn.write_bytes(whole[:size])
        with pytest.warns(TornLogWarning, match=f"last {size - good} bytes"):
            assert tk.read_turns(torn)["turn_index"].to_pylist() == [0]


def test_a_short_write_is_finished(tmp_path, monkeypatch):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        log = TurnLog(tmp_path)
        log.append(turn(), 0, set())
    assert read_log(log.path).num_rows == 1
    log.close()


# Files that roll


def batches_of(paths):
    return [pa.ipc.open_stream(path).read_all().num_rows for path in paths]


@pytest.fixture
def flushed(monkeypatch):
    """What was flushed to disk: of a file its name and size, of a folder its names."""
    calls = []
    fsync = os.fsync

    def noted(file):
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_dir():
            calls.append({one.name for one in path.iterdir()})
        else:
            calls.append((path.name, path.stat().st_size))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    return calls


def test_every_batch_and_every_new_name_is_flushed_to_disk(tmp_path, flushed):
    log = TurnLog(tmp_path / "sizes")
    for k in range(2):
        log.append(turn(), k, set())
    two = log._turns.total_bytes
    log.close()
    log = TurnLog(tmp_path, max_file_bytes=two, fsync=True)
    for k in range(5):
        flushed.clear()
        log.append(turn(), k, set())
        name = f"turns-0000{k // 2}.arrows"
        assert flushed[-1] == (name, (tmp_path / name).stat().st_size)
        if k in (2, 4):
            # the folder was flushed once the new file was in it
            assert any(name in names for names in flushed)
    flushed.clear()
    log.amend("s", [0], "dropped", False)
    name = "amendments-00000.arrows"
    assert any(name in names for names in flushed)
    assert flushed[-1] == (name, (tmp_path / name).stat().st_size)
    log.close()


def test_the_log_rolls_by_bytes(tmp_path):
    log = TurnLog(tmp_path / "one")
    log.append(turn(), 0, set())
    head = log._turns.total_bytes
    log.append(turn(), 1, set())
    each = log._turns.total_bytes - head
    most = head + 2 * each
    log.close()
    log = TurnLog(tmp_path / "two", max_file_bytes=most)
    for k in range(4):
        log.append(turn(), k, set())
    # longer than a file may be: alone in one
    log.append(turn(prompt_ids=np.arange(most, dtype=np.int32)), 4, set())
    log.append(turn(), 5, set())
    total = log._turns.total_bytes
    log.close()
    files = sorted((tmp_path / "two").iterdir())
    assert [file.name for file in files] == [f"turns-0000{k}.arrows" for k in range(4)]
    assert batches_of(files) == [3, 1, 1, 1]
    # each ends as a stream does
    assert all(file.read_bytes().endswith(END_OF_STREAM) for file in files)
    sizes = [file.stat().st_size for file in files]
    assert sum(sizes) == total + len(END_OF_STREAM)
    assert tk.read_turns(tmp_path / "two")["turn_index"].to_pylist() == list(range(6))


def test_a_log_that_cannot_roll_stays_as_it_was(tmp_path, monkeypatch):
    log = TurnLog(tmp_path, max_file_bytes=1)
    log.append(turn(), 0, set())
    before = log.path.read_bytes()

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(turn(), 1, set())
    assert [file.name for file in tmp_path.iterdir()] == [log.path.name]
    assert log.path.read_bytes() == before
    log.append(turn(), 1, set())
    log.close()
    assert tk.read_turns(tmp_path)["turn_index"].to_pylist() == [0, 1]


def test_a_full_file_that_does_not_close_does_not_stop_the_log(tmp_path, monkeypatch):
    """Some network file systems report a full disk there, after all was written."""
    log = TurnLog(tmp_path, max_file_bytes=1)
    log.append(turn(), 0, set())
    close = os.close

    def failing(file):
        close(file)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr("trajkit_shim.sessions.turn_log.os.close", failing)
        log.append(turn(), 1, set())
    log.append(turn(), 2, set())
    log.close()
    assert tk.read_turns(tmp_path)["turn_index"].to_pylist() == [0, 1, 2]


def fill(log):
    for k in count():
        log.append(turn(), k, set())


def test_a_log_has_no_more_bytes_than_it_may(tmp_path):
    log = TurnLog(tmp_path, max_total_bytes=10_000, max_file_bytes=1)
    assert not log.full
    with pytest.raises(LogFullError, match="the limit is 10000"):
        fill(log)
    # what becomes known of the turns is written all the same
    log.amend("s", [0], "dropped", False)
    total = log._turns.total_bytes
    log.close()
    turns = [path for path in tmp_path.iterdir() if path.name.startswith("turns")]
    # the last stream has its end now
    on_disk = sum(path.stat().st_size for path in turns) - len(END_OF_STREAM)
    assert 5_000 < on_disk == total <= 10_000
    trainable = tk.read_turns(tmp_path)["trainable"].to_pylist()
    assert trainable == [False] + [True] * (len(turns) - 1)


def test_a_closed_log_takes_nothing(tmp_path):
    log = TurnLog(tmp_path)
    log.close()
    with pytest.raises(OSError, match="closed"):
        log.append(turn(), 0, set())
    with pytest.raises(OSError, match="closed"):
        log.amend("s", [0], "dropped", False)
    assert [path.name for path in tmp_path.iterdir()] == ["turns-00000.arrows"]


@pytest.mark.parametrize("stem", ["turns", "amendments", "sessions"])
def test_a_directory_that_holds_any_of_a_log_is_refused(tmp_path, stem):
    (tmp_path / f"{stem}-00000.arrows").touch()
    with pytest.raises(FileExistsError):
        TurnLog(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("form", ["full", "delta"])
def test_what_prompt_tokens_show_may_be_left_out(tmp_path, form):
    log = TurnLog(tmp_path, form=form, attributed=False)
    log.append(turn(), 0, set())
    with pytest.raises(ValueError, match="attributed=False"):
        log.append(turn(message_tool_names=[None]), 1, set())
    log.close()
    turns = tk.read_turns(tmp_path)
    assert turns.num_rows == 1
    shown = schema.ATTRIBUTION.names[2:]
    assert not set(shown) & set(turns.column_names)
    assert set(LOG_SCHEMA.names) - set(shown) <= set(tk.expand(turns).column_names)


def removed(path):
    path.unlink()


def replaced(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda path: os.truncate(path, 0), "0 bytes, but", id="emptied"),
        pytest.param(removed, "was removed", id="removed"),
        pytest.param(replaced, "another file", id="replaced"),
        pytest.param(
            lambda path: os.truncate(path, 10**6), "were written", id="longer"
        ),
    ],
)
def test_a_log_that_another_program_changes_takes_no_turn(tmp_path, change, says):
    log, written = TurnLog(tmp_path), set()
    log.append(turn(), 0, written)
    change(log.path)
    for number in (1, 2):
        with pytest.raises(OSError, match=f"another program changed the log: .*{says}"):
            log.append(turn(), number, written)
    # its amendments are another file
    log.amend("s", [0], "dropped", False)
    log.close()


def test_the_log_can_be_imported_without_linux_s_socket_options():
    code = "import socket; del socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE\n"
    code += "import trajkit_shim.sessions.turn_log, trajkit_shim.engines.http\n"
    code += "import trajkit_shim.serve\n"
    subprocess.run([sys.executable, "-c", code], check=True)
