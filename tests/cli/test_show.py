"""`trajkit show` prints what rows train, on any screen, and no control characters."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

import trajkit as tk
from trajkit.analysis.tokenizer import Codec
from trajkit.cli import BAD_USAGE, main, visible
from trajkit.cli.options import load_tokenizer
from trajkit.cli.screen import Screen, text_table

ROOT = Path(__file__).parents[2]
TOKENIZER = str(ROOT / "shim/trajkit_shim/engines/embedded/tokenizer.json")
HOSTILE = "\x1b[2J\x07\u202eevil\u2066\r\x9b1m\u200b"


class Terminal(io.TextIOWrapper):
    """A terminal that keeps what was written."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding)

    def isatty(self):
        return True

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def terminal(monkeypatch):
    """Run a command on a terminal of some width, and return what it prints."""

    def shown(*argv, width=80, encoding="utf-8", **environment):
        for name in ("NO_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"COLUMNS": str(width), **environment}.items():
            monkeypatch.setenv(name, value)
        screen = Terminal(encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            assert main([*argv]) == 0
        return screen.text()

    return shown


def ids(text):
    return load_tokenizer(Path(TOKENIZER)).encode(text, add_special_tokens=False).ids


@pytest.fixture
def turns(tmp_path):
    """Turn 1 returns turn 0's reply without a line break; a message is hostile."""
    head = ids(
        "<|im_start|>user\n" + "a long question " * 40 + HOSTILE + "<|im_end|>\n"
    )
    reply, end = ids("It holds. \n<|im_end|>"), ids("<|im_end|>")
    question = {"role": "user", "content": HOSTILE}
    answer = {"role": "assistant", "content": "It holds."}
    calls = [
        {
            "session_id": f"s{HOSTILE}",
            "prompt_ids": prompt,
            "output_ids": output,
            "prompt_messages": messages,
            "response_message": answer,
        }
        for prompt, output, messages in [
            (head, reply, [question]),
            (
                head + ids("It holds.") + end,
                ids("Yes") + end,
                [question, answer, question],
            ),
        ]
    ]
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(calls), path)
    return str(path)


SLIME = ["--policy", "slime"]


def test_long_texts_are_folded(capsys, turns):
    argv = ["show", turns, *SLIME, "--tokenizer", TOKENIZER]
    assert main(argv) == 0
    assert "tokens of context ..." in capsys.readouterr().out
    assert main([*argv, "--unfold"]) == 0
    out = capsys.readouterr().out
    assert out.count("a long question") == 40
    assert "tokens of context" not in out


@pytest.mark.parametrize("options", [[], ["--tokenizer", TOKENIZER, "--unfold"]])
def test_no_text_controls_the_terminal(capsys, turns, options):
    assert main(["show", turns, *options]) == 0
    out = capsys.readouterr().out
    assert all(char.isprintable() for char in out.replace("\n", ""))
    assert visible(HOSTILE) in out


def test_rows_are_shown_without_their_turns(tmp_path, capsys, turns):
    for dedup in (False, True):
        rows = tk.linearize(tk.read_turns(turns), "slime")
        path = tmp_path / f"{dedup}.parquet"
        tk.write_rows(rows, path, dedup=dedup)
        assert main(["show", str(path), "--tokenizer", TOKENIZER]) == 0
        out = capsys.readouterr().out
        assert "lost        (absorbed: 9 tokens of turn 0)\n" in out
        assert "trained     Yes⟦<|im_end|>⟧\n" in out
    files = [str(tmp_path / f"{dedup}.parquet") for dedup in (False, True)]
    assert main(["show", *files, "--tokenizer", TOKENIZER]) == 0
    assert capsys.readouterr().out == 2 * out
    for name in ("show", "why"):
        assert main([name, files[0], "--policy", "trl"]) == BAD_USAGE
        assert "--policy is for turns, and " in capsys.readouterr().err


def test_tokens_in_no_row_have_a_reason(tmp_path, capsys):
    path, call = tmp_path / "turns.jsonl", {"session_id": "a", "output_ids": [3]}
    calls = [{**call, "prompt_ids": ids} for ids in ([1], [1, 2, 4])]
    tk.write_turns(tk.from_records(calls), path)
    assert main(["show", str(path), "--policy", "miles"]) == 0
    assert capsys.readouterr().out.endswith(
        "session a, in no row\nlost        (refused by turn 1: 1 token of turn 1) 3\n\n"
    )


def test_a_terminal_gets_colours_unless_they_are_forbidden(terminal, turns):
    argv = ["show", turns, *SLIME, "--tokenizer", TOKENIZER]
    assert "\x1b[32mYes\x1b[0m" in terminal(*argv)
    for forbids in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = terminal(*argv, **forbids)
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)
        assert "trained     Yes" in re.sub(r"\x1b\[[\d;]+m", "", plain)
    assert "\x1b[32m" in terminal(*argv, NO_COLOR="")


@pytest.mark.parametrize("width", [1, 20, 60])
def test_lines_fit_the_terminal(terminal, turns, width):
    argv = ["show", turns, *SLIME, "--tokenizer", TOKENIZER, "--unfold"]
    out = re.sub(r"\x1b\[[\d;]+m", "", terminal(*argv, width=width, NO_COLOR="1"))
    lines = out.splitlines()
    texts = [line for line in lines[1:] if line.startswith(" ")]
    assert max(map(cell_len, texts)) <= max(width, 14)
    assert "".join(line.strip() for line in texts).count("question") >= 38


def test_tables_have_no_control_characters():
    assert text_table(["id"], [[HOSTILE]]).splitlines()[2:] == [visible(HOSTILE)]


def test_an_encoding_without_arrows_gets_escapes(terminal, turns):
    out = terminal("show", turns, "--tokenizer", TOKENIZER, encoding="ascii")
    assert "\\u27e6<|im_end|>\\u27e7" in out


def test_halves_of_characters_are_bytes():
    codec = Codec(load_tokenizer(Path(TOKENIZER)))
    tokens = codec.ids("a\U0001f600b")
    assert len(tokens) > 3
    assert codec.exact(tokens) == "a\U0001f600b"
    assert codec.exact(tokens[:2]) == "a\\xf0"
    assert codec.exact(tokens[2:]).endswith("\\x80b")


def test_bytes_of_other_tokenizers():
    class SentencePiece:
        def encode(self, text, *, add_special_tokens):
            return []

        def decode(self, tokens, *, skip_special_tokens):
            return bytes([0xE2, 0x82, 0xAC][token] for token in tokens).decode(
                errors="replace"
            )

        def convert_ids_to_tokens(self, token):
            return ["<0xE2>", "<0x82>", "<0xAC>"][token]

    class Nameless(SentencePiece):
        convert_ids_to_tokens = None

        def __getattribute__(self, name):
            if name == "convert_ids_to_tokens":
                raise AttributeError(name)
            return super().__getattribute__(name)

    half = np.array([0, 1], np.int32)
    assert Codec(SentencePiece()).exact(half) == "\\xe2\\x82"
    assert Codec(Nameless()).exact(half) == "\ufffd"


def test_a_character_wider_than_the_screen_is_printed(capsys):
    screen = Screen()
    screen.width = 1
    screen.labelled("x", [("漢a", "")])
    space = " " * 12
    assert capsys.readouterr().out == f"x{space[1:]}漢\n{space}a\n"


def test_standard_output_that_is_a_pipe_is_not_wrapped(monkeypatch, capsys, turns):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["show", turns, "--unfold", "--tokenizer", TOKENIZER]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 500
