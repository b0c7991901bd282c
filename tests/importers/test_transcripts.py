"""Random transcripts become calls, or a line that says why not."""

from hypothesis import HealthCheck, given, settings

import trajkit as tk
from tests import foreign
from tests.importers.test_importers import Letters
from tests.strategies import transcripts


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(transcripts())
def test_every_reply_that_something_precedes_is_a_call(tmp_path, conversations):
    """Every reply that something precedes is a call, or told to be none."""
    tokenizer = Letters()
    expected = []
    for number, messages in enumerate(conversations, 1):
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:
                continue
            prompt, whole = (
                tokenizer.apply_chat_template(
                    said, tools=None, add_generation_prompt=asks, tokenize=False
                )
                for said, asks in ((messages[:k], True), (messages[: k + 1], False))
            )
            if whole.startswith(prompt):
                name = f"sft.jsonl, line {number}"
                reply = whole.removeprefix(prompt)
                expected.append((name, [*map(ord, prompt)], [*map(ord, reply)]))
    foreign.write_chats(tmp_path, conversations)
    file = tmp_path / "sft.jsonl"
    turns, report = tk.import_turns(file, "chat", tokenizer=tokenizer)
    got = turns.select(["session_id", "prompt_ids", "output_ids"]).to_pylist()
    assert [tuple(turn.values()) for turn in got] == expected
    told = [
        (row["problem"], row["kept"])
        for row in report.to_pylist()
        # its tokens are code points, none of them special
        if row["problem"] not in ("no_end_token", "empty")
    ]
    assert told.count(("not_sampled", True)) == len(expected)
    replies = sum(m["role"] == "assistant" for said in conversations for m in said)
    silent = sum(all(m["role"] != "assistant" for m in said) for said in conversations)
    assert len(told) == replies + silent
