"""The commands of the README and of docs/look.md print what the pages show."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import trajkit as tk
from trajkit.cli import BAD_DATA, DONE, main
from trajkit.cli.options import load_tokenizer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
TOKENIZER = ROOT / "shim/trajkit_shim/engines/embedded/tokenizer.json"
BLOCK = re.compile(r"^```sh\n(.*?)^```$(?:\n\n^```none\n(.*?)^```$)?", re.M | re.S)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A session of three calls: white space of the first reply changes on its way."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(TOKENIZER, "tokenizer.json")
    tokenizer = load_tokenizer(Path("tokenizer.json"))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    def said(role, text):
        return ids(f"<|im_start|>{role}\n{text}<|im_end|>\n")

    opens = ids("<|im_start|>assistant\n")
    messages = [
        {"role": "system", "content": "You fix Python code. " * 6},
        {"role": "user", "content": "Run the test."},
        {"role": "assistant", "content": "I run the test. \n\n"},
        {"role": "tool", "content": "1 failed"},
        {"role": "assistant", "content": "It fails."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "Done."},
    ]
    replies = [ids(messages[k]["content"] + "<|im_end|>") for k in (2, 4, 6)]
    start = said("system", messages[0]["content"]) + said("user", "Run the test.")
    shown = said("assistant", "I run the test.") + said("tool", "1 failed")
    prompts = [start + opens, start + shown + opens]
    prompts.append(
        prompts[1] + replies[1] + ids("\n") + said("user", "Fix it.") + opens
    )
    calls = [
        {
            "session_id": "s",
            "prompt_ids": prompt,
            "output_ids": reply,
            "output_logprobs": [-0.5] * len(reply),
            "prompt_messages": messages[: 2 * k + 2],
            "response_message": messages[2 * k + 2],
        }
        for k, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    Path("run").mkdir()
    tk.write_turns(tk.from_records(calls), "run/turns.parquet")


def test_the_page_shows_what_the_commands_print(run, capsys):
    page = (ROOT / "docs/look.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    assert len(blocks) >= 7
    for commands, shown in blocks:
        for line in commands.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "trajkit"
            assert main(arguments) == 0
        out = capsys.readouterr().out
        if shown:
            assert out.rstrip() == shown.rstrip(), commands


def test_a_strangers_log_becomes_a_table_an_answer_and_a_page(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(
        r"^trajkit (.*(?:examples/check|log\.parquet).*)$", README, re.M
    )
    assert [command.split()[0] for command in commands] == ["import", "check", "view"]
    codes, printed = [], []
    for command in commands:
        codes.append(main(shlex.split(command)))
        printed.append(capsys.readouterr().out)
    assert codes == [DONE, BAD_DATA, DONE]
    shown = re.search(
        r"<!-- output of trajkit check -->\n```none\n(.*?)```", README, re.S
    )
    assert printed[1] == shown[1]
    turns = tk.read_turns("log.parquet")
    assert turns["session_id"].unique().to_pylist() == [
        *("agent-1", "agent-2", "agent-3")
    ]
    assert "</html>" in Path("page.html").read_text("utf-8")
