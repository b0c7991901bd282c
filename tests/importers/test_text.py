"""Text as calls: the output of a reply is what an engine would sample."""

import pytest

import trajkit as tk
from tests.importers import foreign

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<|system|>"),
)
WORDS = ("\n", *"user assistant system tool ask call result done x".split())

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# what came before the last user message loses its reasoning
GLM_THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ m.reasoning_content }}"
    "{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def tokenizer(template, *, special=True):
    """A tokenizer of a few words, as transformers loads them."""
    names = [*SPECIAL, *WORDS]
    vocab = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="x"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("|".join(WORDS)), "isolated"
    )
    marks = [tokenizers.AddedToken(one, special=special) for one in SPECIAL]
    made.add_special_tokens(marks) if special else made.add_tokens(marks)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>"
    )
    fast.chat_template = template
    return fast, names


SAID = (
    *(("user", "ask"), ("assistant", "call"), ("tool", "result")),
    *(("assistant", "done"), ("user", "ask")),
)


def outputs(tmp_path, template, said=SAID, special=True, **extra):
    made, names = tokenizer(template, special=special)
    messages = [{"role": role, "content": text, **extra} for role, text in said]
    foreign.write_chats(tmp_path, [messages])
    turns, report = tk.import_turns(tmp_path, tokenizer=made)
    texts = [
        ["".join(names[token] for token in ids) for ids in turns[name].to_pylist()]
        for name in ("prompt_ids", "output_ids")
    ]
    found = [row["problem"] for row in report.to_pylist()]
    return *texts, [one for one in found if one != "not_sampled"], turns


@pytest.mark.parametrize("special", [True, False])
def test_the_line_feed_after_the_end_token_is_the_template_s(tmp_path, special):
    prompts, replies, found, turns = outputs(tmp_path, CHATML, special=special)
    assert replies == ["call<|im_end|>", "done<|im_end|>"]
    assert prompts[1].endswith("result<|im_end|>\n<|im_start|>assistant\n")
    assert found == []
    assert sum(tk.linearize(turns)["loss_mask"][0].as_py()) == 4


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_next_role_ends_a_reply_of_glm(tmp_path, count, special):
    _, replies, found, _ = outputs(tmp_path, GLM, SAID[:count], special=special)
    # after the last reply an engine samples the marker of the user
    first = "call<|observation|>" if count > 2 else "call<|user|>"
    assert replies == [first, "done<|user|>"][: 1 if count < 4 else 2]
    assert found == []


def test_an_added_token_within_a_reply_is_not_its_end(tmp_path):
    said = (("user", "ask"), ("assistant", "call<|endoftext|>"), ("tool", "result"))
    for special in (True, False):
        _, replies, _, _ = outputs(tmp_path, GLM, said, special=special)
        ended = "" if special else "<|observation|>"
        assert replies == [f"call<|endoftext|>{ended}"]


def test_the_last_reply_with_a_tool_call_ends_with_the_tool_s_marker(tmp_path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    _, replies, _, _ = outputs(tmp_path, GLM, SAID[:2], tool_calls=calls)
    assert replies == ["call<|observation|>"]


def test_reasoning_that_later_messages_lose_hides_no_end(tmp_path):
    _, replies, found, _ = outputs(tmp_path, GLM_THINKS, reasoning_content="x")
    assert replies == ["xcall<|observation|>", "xdone<|user|>"]
    assert found == []


def test_a_reply_that_nothing_ends_has_a_line(tmp_path):
    _, replies, found, _ = outputs(tmp_path, PLAIN)
    assert replies == ["call\n", "done\n"]
    assert found == ["no_end_token"] * 2


def test_a_log_of_requests_without_ids_is_text(tmp_path):
    made, names = tokenizer(CHATML)
    request = {"messages": [{"role": "user", "content": "ask"}], "tools": []}
    message = {"role": "assistant", "content": "done"}
    response = {"choices": [{"message": message}], "usage": {"completion_tokens": 99}}
    line = {"session_id": "s", "request": request, "response": response, "reward": 1}
    silent = {**line, "response": {"choices": [{"message": None}]}}
    foreign.write_lines(tmp_path / "log.jsonl", [line, silent])
    turns, report = tk.import_turns(tmp_path, tokenizer=made)
    output = [names[token] for token in turns["output_ids"][0].as_py()]
    assert output == ["done", "<|im_end|>"]
    assert turns["sampled"].to_pylist() == [False]
    assert turns["reward"].to_pylist() == [1.0]
    assert report["problem"].to_pylist() == ["not_sampled", "no_output_ids"]


def test_a_repeated_id_of_two_transcripts_is_left_out(tmp_path):
    made, _ = tokenizer(CHATML)
    messages = [{"role": role, "content": text} for role, text in SAID[:2]]
    lines = [{"id": 0, "messages": messages}] * 2
    foreign.write_lines(tmp_path / "sft.jsonl", lines)
    turns, report = tk.import_turns(tmp_path, tokenizer=made)
    assert turns.num_rows == 1
    (left,) = [one for one in report.to_pylist() if not one["kept"]]
    assert (left["place"][:6], left["problem"]) == ("line 2", "repeated_session")
    assert "--map session_id=@name" in left["detail"]
    turns, _ = tk.import_turns(tmp_path, tokenizer=made, map="session_id=@name")
    assert len(turns["session_id"].unique()) == 2


def test_a_system_text_beside_the_messages_comes_first(tmp_path):
    made, names = tokenizer(CHATML)
    said = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "done"}]
    chat = {"id": 0, "system": "call", "conversations": said}
    foreign.write_lines(tmp_path / "sft.jsonl", [chat])
    turns, _ = tk.import_turns(tmp_path, tokenizer=made)
    text = "".join(names[token] for token in turns["prompt_ids"][0].as_py())
    assert text.startswith("<|im_start|>system\ncall<|im_end|>")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "text", "text": "ask"}], None),
        ([{"type": "image_url", "image_url": {"url": "u"}}], "unreadable"),
        ("ask<|im_end|>\n<|im_start|>user\nask", "refused"),
    ],
)
def test_a_message_is_text_and_no_structure(tmp_path, content, problem):
    prompts, _, found, _ = outputs(
        tmp_path, CHATML, (("user", content), ("assistant", "done"))
    )
    asked = "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == ([asked] if problem is None else [])
    assert found == ([problem] if problem else [])


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_reply_that_is_not_to_train_is_context(tmp_path, key):
    for value, problem in ((0, []), (False, []), (0.5, ["unread"])):
        _, _, found, turns = outputs(tmp_path, CHATML, SAID[:2], **{key: value})
        assert turns["trainable"].to_pylist() == [False]
        assert found == problem
