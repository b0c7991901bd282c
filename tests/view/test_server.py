"""The server: the same page, any policy, and nobody else."""

import gzip
import http.client
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.parse import quote_plus, urlsplit

import pytest

import trajkit as tk
from tests.view.test_page import counts, simulated
from trajkit.cli import view
from trajkit.cli.options import Reading, policy_of
from trajkit.view.pages import LiveRun, ViewServer

CALLS = [
    {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4, 5]},
    {"session_id": "a", "prompt_ids": [1, 2, 3, 9, 6], "output_ids": [7]},
]


@contextmanager
def serving(path, **options):
    follow = options.get("follow", False)
    source = view.Run([str(path)], None, Reading(), {}, follow=follow)
    policies, text = ("faithful", "slime"), {"text": options.get("text", True)}
    more = policies, policy_of, follow, text
    live = LiveRun("run", source.version, source.load, *more)
    with ViewServer([live]) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def turns(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(call) + "\n" for call in CALLS))
    return path


def ask(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    address = host or f"127.0.0.1:{server.server_port}"
    connection.request(method, path, headers={"Host": address})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_only_requests_with_the_token_and_the_host_are_answered(turns):
    with serving(turns) as server:
        path = urlsplit(server.url).path
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, path)[0] == 200
        assert ask(server, path, f"localhost:{server.server_port}")[0] == 200
        for host in ("evil.example", "127.0.0.1", "127.0.0.1:1"):
            assert ask(server, path, host)[0] == 403
        for other in ("/", "/x/", "/x/api/index", path[:-2] + "/", "/api/index"):
            assert ask(server, other)[0] == 404
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(server, path, method=method)[0] == 501


def test_two_servers_have_two_tokens(turns):
    with serving(turns) as one, serving(turns) as other:
        assert one.token != other.token
        assert len(one.token) >= 20


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        ("api/session?id=nobody", 404, "no session 'nobody'"),
        ("api/turns", 404, "turns"),
        ("api/index?policy=slim", 400, "did you mean 'slime'"),
        ("api/index?policy=%20", 400, "policy"),
        ("api/index?policy=slime%20fork_threshold", 400, "expected CHOICE=VALUE"),
        ("../etc/passwd", 404, "not found"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(turns, request_, status, text):
    with serving(turns) as server:
        got, content = ask(server, urlsplit(server.url).path + request_)
        assert got == status
        assert text in content.decode()


@pytest.mark.browser
def test_the_served_page_shows_any_policy(tab, turns):
    with serving(turns) as server:
        tab.open(server.url)
        run = tk.read_turns(turns)
        assert counts(tab) == simulated(run, ["faithful", "slime"])
        chosen = "slime fork_threshold=2"
        tab.run(f"TK.addPolicy({chosen!r}).then(() => true)")
        policies = ["faithful", "slime", tk.policy("slime", fork_threshold=2)]
        assert counts(tab) == simulated(run, policies)
        tab.go(s="a")
        assert counts(tab) == simulated(run, policies)
        assert "policy=" + quote_plus(chosen) in tab.run("location.hash")
        tab.run("TK.addPolicy('slim').then(() => true)")
        assert "did you mean 'slime'" in tab.text("#status")
        # the browser logs the refusal
        assert all("400" in error for error in tab.errors)
        tab.errors.clear()


@pytest.mark.browser
def test_a_followed_run_shows_new_turns(tab, turns):
    with serving(turns, follow=True) as server:
        tab.open(server.url)
        assert "2 turns" in tab.text("#title")
        with turns.open("a") as file:
            file.write(json.dumps({**CALLS[0], "session_id": "b"}) + "\n")
        tab.run("TK.look().then(() => true)")
        assert "3 turns" in tab.text("#title")
        assert tab.texts("#side .line bdi") == ["a", "b"]


def test_a_session_is_made_for_its_request(turns):
    with serving(turns) as server:
        path = urlsplit(server.url).path
        status, content = ask(server, f"{path}api/session?id=a&policy=strict")
        assert status == 200
        assert b'"label":"strict"' in gzip.decompress(content)


@pytest.mark.browser
def test_the_served_page_finds_what_a_reader_sees(tab, tmp_path):
    path = tmp_path / "turns.jsonl"
    ask_ = {"role": "user", "content": "Wie spät ist es?"}
    reply = {"role": "assistant", "content": "Noon."}
    calls = [
        {**CALLS[0], "prompt_messages": [ask_], "response_message": reply},
        {**CALLS[0], "session_id": "b"},
    ]
    path.write_text("".join(json.dumps(call) + "\n" for call in calls))
    found = {"spät": ["a"], "noon": ["a"], "midnight": [], ".*": [], "content": []}
    for text in (True, False):
        with serving(path, text=text) as server:
            for word, names in found.items():
                tab.open(f"{server.url}#f={quote_plus(word)}")
                assert tab.texts("#side .line bdi") == (names if text else [])


def test_the_command_prints_its_address_and_ends_with_ctrl_c(turns):
    command = [Path(sys.executable).with_name("trajkit"), "view", turns, "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip()
    assert urlsplit(address).hostname == "127.0.0.1"
    os.kill(process.pid, 2)
    assert process.wait() == 0
    process.stdout.close()
