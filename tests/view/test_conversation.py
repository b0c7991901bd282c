"""The conversation of a session in a real browser, the search over texts, and a phone."""

import base64
import io
import json

import pytest
from PIL import Image

import trajkit as tk
from trajkit.cli import main
from trajkit.view import page

pytestmark = pytest.mark.browser


def picture():
    """A small image as a data URL."""
    file = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is on it?"},
        {"type": "image_url", "image_url": {"url": picture()}},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="},
        },
    ],
}
CALL = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "A tool can tell.",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "look", "arguments": '{"path": "a.png", "n": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "red" * 1000}
ANSWER = {"role": "assistant", "content": "Red."}
EDITED = {"role": "assistant", "content": "Read."}
THANKS = {"role": "user", "content": "Thanks."}


def session(name, *, last="Bye."):
    """Three turns: a call, an answer whose text the client edits, and a farewell."""
    calls = [
        ([SYSTEM, ASK], CALL, [1, 2], [3, 4, 5, 6]),
        ([SYSTEM, ASK, CALL, RESULT], ANSWER, [1, 2, 3, 4, 0, 6, 7], [8, 9]),
        (
            [SYSTEM, ASK, CALL, RESULT, EDITED, THANKS],
            {"role": "assistant", "content": last},
            [1, 2, 3, 4, 0, 6, 7, 8, 1],
            [9],
        ),
    ]
    names = ("prompt_messages", "response_message", "prompt_ids", "output_ids")
    return [
        {"session_id": name, **dict(zip(names, call, strict=True))} for call in calls
    ]


@pytest.fixture
def show(tab, tmp_path):
    """Open the page of some records at an address."""

    def shown(records, at="", policies=("trl", "faithful", "per_call"), **options):
        path = tmp_path / "page.html"
        path.write_text(page(tk.from_records(records), policies, **options), "utf-8")
        tab.open(path.as_uri() + at)
        return tab

    return shown


def articles(tab):
    return tab.run("[...document.querySelectorAll('.message')].map((e) => e.innerText)")


def test_a_session_opens_with_its_conversation(show):
    tab = show(session("a"), "#s=a")
    assert tab.text("[role=tab][aria-selected=true]") == "Conversation"
    texts = articles(tab)
    roles = [text.split()[0].lower() for text in texts]
    assert roles == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    assert "Be brief." in texts[0]
    assert "I look." in texts[2]
    assert texts[-1].startswith("ASSISTANT")
    assert "Bye." in texts[-1]


def test_reasoning_is_folded_and_arguments_are_shown(show):
    tab = show(session("a"), "#s=a")
    call = articles(tab)[2]
    assert "reasoning" in call
    assert "A tool can tell." not in call
    for shown in ("look", "path", "a.png", "n", "2"):
        assert shown in call.split()
    tab.click(".message.assistant details summary")
    assert "A tool can tell." in articles(tab)[2]
    # and so is a long message
    assert "red" * 400 in articles(tab)[3]
    assert "red" * 401 not in articles(tab)[3]
    tab.run("document.querySelector('.message.tool button').click()")
    assert "red" * 1000 in articles(tab)[3]


@pytest.mark.parametrize("sampled", ['{"path": ', "[1]", "null", '"x"'])
def test_arguments_that_are_no_object_are_shown_as_they_were_sampled(show, sampled):
    records = session("a")
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = sampled
    tab = show([{**records[0], "response_message": call}], "#s=a")
    assert sampled.strip() in tab.text(".tool-call pre")


def test_only_pixel_images_become_thumbnails(show):
    tab = show(session("a"), "#s=a")
    images = "[...document.querySelectorAll('.message img')]"
    assert tab.run(f"{images}.map((e) => e.src)") == [picture()]
    assert tab.run(f"{images}[0].decode().then(() => 'shown')") == "shown"
    assert "image data:image/svg+xml" in articles(tab)[1]


def test_replies_show_what_the_policy_does_with_them_and_their_drift(show):
    records = session("a")
    tab = show(records, "#s=a")
    spans = tk.analysis.output_spans(tk.from_records(records), "trl").to_pylist()
    first = [span for span in spans if span["turn_index"] == 0]
    assert {span["kind"] for span in first} == {"trained", "absorbed"}
    reply = articles(tab)[2]
    assert "turn 0: 4 tokens" in reply
    for span in first:
        n = span["output_stop"] - span["output_start"]
        assert f"{n} {span['kind']}" in reply
    assert "drift in turn 1: " in reply
    # the text that the client edited is no reply of the model
    assert "NOT A RECORDED REPLY" in articles(tab)[4].upper()
    tab.click(".message button.drifted")
    assert tab.run("[TK.app.state.tab, TK.app.state.t]") == ["drift", 1]
    tab.go(tab="conversation", t=2)
    tab.run("document.querySelector('[data-turn=\"0\"] footer button').click()")
    state = tab.run("[TK.app.state.tab, TK.app.state.t, TK.app.state.k]")
    assert state == ["tokens", 0, 2]


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (None, ["4 5"]),  # the log does not have it
        ({**ANSWER, "content": ""}, ["4 5"]),
        ({**ANSWER, "content": None}, ["4 5"]),
        ({**CALL, "content": None}, ["look", "a.png"]),
    ],
)
def test_a_reply_without_text_has_a_box_with_its_tokens(show, reply, shown):
    messages = [SYSTEM, reply or ANSWER, THANKS]
    given = {} if reply is None else {"response_message": reply}
    first = {"session_id": "a", "prompt_ids": [1], "output_ids": [4, 5], **given}
    second = {**first, "prompt_ids": [1, 4, 5, 6], "prompt_messages": messages}
    tab = show([{**first, "prompt_messages": [SYSTEM]}, second], "#s=a&p=per_call")
    boxes = articles(tab)
    assert [text.split()[0] for text in boxes] == [
        *("SYSTEM", "ASSISTANT", "USER", "ASSISTANT")
    ]
    for box, turn in ((boxes[1], 0), (boxes[3], 1)):
        assert f"turn {turn}: 2 tokens" in box
        assert "2 trained" in box
        assert "NOT A RECORDED" not in box.upper()
    for text in shown:
        assert text in boxes[3]
    blue = tab.run("getComputedStyle(document.querySelector('.sharebar i')).background")
    edge = "getComputedStyle(document.querySelector('[data-turn]')).borderLeftColor"
    assert tab.run(edge) in blue


def test_another_turn_shows_its_own_conversation(show):
    records = session("a")
    other = {"role": "user", "content": "Start over."}
    fourth = {
        **records[0],
        "prompt_messages": [SYSTEM, other],
        "response_message": ANSWER,
        "prompt_ids": [5],
    }
    tab = show([*records, fourth], "#s=a&t=3")
    assert [text.split("\n")[-1] for text in articles(tab)][:1] == ["Be brief."]
    assert "Start over." in articles(tab)[1]
    # the longest conversation is the first that is shown
    tab = show([*records, fourth], "#s=a")
    assert len(articles(tab)) == 7


def test_without_messages_a_session_opens_with_what_is_there(show):
    records = [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    tab = show(records, "#s=a")
    assert tab.text("[role=tab][aria-selected=true]") == "Tokens"
    tab.go(s="a", tab="conversation")
    assert "recorded without messages" in tab.text("#panel")
    prompt, reply = articles(tab)
    assert prompt.split() == ["PROMPT", "1"]
    assert reply.split()[:3] == ["ASSISTANT", "2", "3"]
    assert "2 trained" in reply


def test_a_page_without_text_does_not_open_the_conversation(show):
    tab = show(session("a"), "#s=a", text=False)
    assert tab.text("[role=tab][aria-selected=true]").startswith("Lost")
    tab.go(s="a", tab="conversation")
    assert "The log does not have the text." in tab.text("#panel")


def shown_sessions(tab):
    return tab.run("TK.shown.map((k) => TK.app.index.sessions.id[k])")


def test_the_filter_finds_words_of_messages(show):
    records = [*session("a"), *session("b", last="Slugify it."), *session("c")]
    tab = show(records)
    tab.run(
        "{ const e = document.querySelector('#side input'); e.value = 'SLUGIFY';"
        " e.dispatchEvent(new Event('input'));"
        " e.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})) }"
    )
    tab.run("TK.app.shown")
    assert shown_sessions(tab) == ["b"]
    # the address has the search
    address = tab.run("location.href")
    tab.open(address)
    tab.run("TK.app.shown")
    assert shown_sessions(tab) == ["b"]
    # a reader sees no names of fields, and no data of images
    for word in ("content", "arguments", "base64", "call_1"):
        assert shown_sessions(show(records, "#f=" + word)) == []
    for word in ("brief", "what", "tell", "look", "a.png"):
        assert shown_sessions(show(records, "#f=" + word)) == ["a", "b", "c"]


def test_a_filter_that_is_wrong_says_so(show):
    tab = show(session("a:b:task:7"))
    unknown = "unknown filter {}: expected one of lost, logprob,"
    for text, fault in {
        "sise:1:2": unknown.format("sise"),
        "foo:": unknown.format("foo"),
        "constructor:1:2": unknown.format("constructor"),
        "turns:1:x": "turns:1:x: expected numbers",
        "turns:5": "turns:5: expected numbers, such as turns:0:20",
        "turns:1:": "",
        "a:b:task:7": "",
    }.items():
        tab.run(f"TK.setFilter({text!r})")
        note = tab.text(".filter-note")
        assert note.startswith(fault)
        assert bool(note) == bool(fault)


def test_a_phone_shows_the_page_without_scrolling_sideways(show):
    long = {"session_id": "b", "prompt_ids": [*range(50)], "output_ids": [1]}
    tab = show([*session("a"), long])
    tab.size(390, 800)
    for at in ("", "conversation", "losses", "drift", "forest", "tokens"):
        tab.go(s=at and ("b" if at == "tokens" else "a"), tab=at or None)
        wide = tab.run("document.documentElement.scrollWidth")
        assert wide <= 390
        assert tab.run("document.querySelector('table.policies').clientHeight") > 30
        if at:
            assert tab.run("document.querySelector('.tabs').clientHeight") > 20
    # no line of tokens is cut off
    lines = "[...document.querySelectorAll('.text')]"
    assert tab.run(f"{lines}.some((e) => e.scrollWidth > e.clientWidth)") is False


def test_the_page_for_paper_shows_one_session_after_the_other(tab, tmp_path):
    names = [f"s{k:02}" for k in range(21)]
    log, path = tmp_path / "log.jsonl", tmp_path / "page.html"
    tk.write_turns(tk.from_records([c for n in names for c in session(n)]), log)
    arguments = ["view", str(log), "--print", "--policy", "trl"]
    assert main([*arguments, "-o", str(path)]) == 0
    tab.open(path.as_uri())
    tab.run("TK.app.shown")
    assert tab.texts("header.session h2") == names[:20]
    assert "The first 20 of 21 sessions follow" in tab.text("main")
    # what the policy loses of each, with the reason
    assert len(tab.texts("table.losses")) == 20
    assert "what to change" in tab.text("main")
    assert (
        tab.run("getComputedStyle(document.getElementById('side')).display") == "none"
    )
    # the same without a file to write is refused
    assert main(arguments) == 2
