"""The files of the page, and what the command writes, without a browser."""

import hashlib
import re
from importlib.resources import files

import pyarrow as pa
import pytest

import trajkit as tk
from benchmarks import data
from trajkit import cli
from trajkit.analysis.words import LOSS_GROUPS, LOSS_WORDS, MENDS, OUTPUTS
from trajkit.schema import CAUSES, LOSSES, OUTPUT_KINDS, SESSIONS, TEXT_CAUSES
from trajkit.view import page
from trajkit.view.pages import SCRIPTS
from trajkit.view.tables import selected, token_pieces

STATIC = files("trajkit.view") / "static"


def turns_of(*names, n=1):
    return [
        {
            "session_id": name,
            "turn_index": k,
            "prompt_ids": [1, 2],
            "output_ids": [3] * (k + 1),
            "output_logprobs": [-float(name[1:]) - 0.5] * (k + 1),
        }
        for name in names
        for k in range(n)
    ]


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "turns.parquet"
    tk.write_turns(tk.from_records(turns_of("s0", "s1", "s2", "s3", "s4")), path)
    return path


def test_vendored_files_are_those_whose_hash_is_listed():
    listed = dict(
        re.findall(
            r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$",
            (STATIC / "vendor/VENDORED.md").read_text("utf-8"),
            re.MULTILINE,
        )
    )
    scripts = [name for name in SCRIPTS if name.startswith("vendor/")]
    assert listed.keys() == {name.removeprefix("vendor/") for name in scripts}
    for name, digest in listed.items():
        content = (STATIC / "vendor" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest


def test_scripts_never_take_text_as_markup():
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b"
        r"|new Function|srcdoc|createContextualFragment"
    )
    ours = [name for name in SCRIPTS if not name.startswith("vendor/")]
    found = [name for name in ours if markup.search((STATIC / name).read_text("utf-8"))]
    assert found == []


def test_colours_are_those_of_all_displays():
    style = (STATIC / "page.css").read_text("utf-8").partition("@media")[0]
    used = dict(re.findall(r"--(\w+): (#\w+);", style))
    shown = {
        "trained": "trained",
        "drift": "absorbed",
        "end": "cut",
        "no_row": "refused",
    }
    for group, kind in shown.items():
        assert used[group] == OUTPUTS[kind]


def test_every_group_of_losses_has_words_and_a_colour():
    style = (STATIC / "page.css").read_text("utf-8")
    assert {*LOSS_WORDS} == {*LOSSES}
    assert [*OUTPUTS] == [*OUTPUT_KINDS]
    assert {*MENDS} == {*CAUSES[1:], *TEXT_CAUSES}
    assert {group for group, _ in LOSS_WORDS.values()} | {"trained"} == {*LOSS_GROUPS}
    for group in LOSS_GROUPS:
        assert f"--{group}:" in style


def test_the_page_asks_for_nothing_outside_itself():
    html = page(tk.from_records(turns_of("s0")), ["faithful"])
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in html
    assert not re.search(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=", html)


def test_equal_turns_give_equal_pages():
    turns = tk.from_records(turns_of("s0", "s1"))
    pages = (page(one, ["slime"]) for one in (turns, turns, tk.compact(turns)))
    assert len({*map(str, pages)}) == 1


def test_a_notebook_shows_the_page_in_a_frame_of_its_own():
    frame = page(tk.from_records(turns_of("s0")), "strict", title='"<b>')._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"')
    assert frame.count("<") == 2


def batches(*names, n=1):
    return tk.from_records(turns_of(*names, n=n)).to_batches(max_chunksize=1)


def chosen(*names, **choice):
    turns, total = selected(iter(batches(*names)), **choice)
    assert total == len(names)
    return turns["session_id"].unique().to_pylist()


def test_a_sample_is_the_same_whatever_the_order_of_sessions():
    names = [f"s{k}" for k in range(40)]
    sample = chosen(*names, sample=7)
    assert len(sample) == 7
    assert sorted(sample) == sorted(chosen(*reversed(names), sample=7))
    assert set(chosen(*names, sample=3)) <= set(sample)
    assert sample != names[:7]


def test_the_command_says_what_the_file_has(run, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert cli.main(["view", str(run), "-o", str(path), "--sample", "2"]) == cli.DONE
    out = capsys.readouterr().out
    assert "2 of 5 sessions, 2 turns" in out
    assert "the text of all messages; --no-text leaves it out" in out


@pytest.mark.slow
def test_a_page_of_24_rollouts_is_below_8_megabytes():
    rollouts = data.mixed(24)
    tables = [
        tk.compact(tk.from_records(list(data.rollout(name, size, shape, seed))))
        for seed, (name, size, shape) in enumerate(rollouts)
    ]
    assert len(page(pa.concat_tables(tables), ["slime", "faithful"])) < 8_000_000


def test_sessions_that_have_not_ended_are_shown(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    tk.write_turns(tk.from_records(turns_of("s0", "s1")), folder / "turns.parquet")
    ended = [{"session_id": "s0", "reward": 1.0, "group_id": None, "error": None}]
    table = pa.Table.from_pylist(ended, SESSIONS)
    tk.write_sessions(table, folder / "sessions.parquet")
    path = tmp_path / "page.html"
    assert cli.main(["view", str(folder), "-o", str(path)]) == cli.DONE
    assert "2 of 2 sessions" in capsys.readouterr().out


class Pieces:
    """A tokenizer of SentencePiece's kind: words with their space, and bytes."""

    words = ("<s>", "\u2581Hello", "\u2581", "lo", "<0xE2>", "\u2581\u2581x")

    def id_to_token(self, token):
        return self.words[token]

    def encode(self, text, *, add_special_tokens):
        return [self.words.index(text)]

    def decode(self, ids, *, skip_special_tokens):
        words = [self.words[token] for token in ids]
        if skip_special_tokens:
            words = [word for word in words if word != "<s>"]
        text = "".join("\ufffd" if word == "<0xE2>" else word for word in words)
        # the first space of a text is dropped
        return text.replace("\u2581", " ").removeprefix(" ")


def test_a_token_s_own_space_and_bytes_are_kept():
    pieces = token_pieces(Pieces(), [5, 4, 3, 2, 1, 0])
    assert pieces["id"] == [0, 1, 2, 3, 4, 5]
    assert pieces["text"] == ["<s>", " Hello", " ", "lo", None, "  x"]
    assert pieces["hex"] == [None, None, None, None, "e2", None]
    assert pieces["special"] == [1, 0, 0, 0, 0, 0]
