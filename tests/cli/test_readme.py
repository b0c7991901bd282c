"""The commands of the README's first screen, in a folder with its example."""

import re
import shlex
from pathlib import Path

import trajkit as tk
from trajkit import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


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
        codes.append(cli.main(shlex.split(command)))
        printed.append(capsys.readouterr().out)
    assert codes == [cli.DONE, cli.BAD_DATA, cli.DONE]
    shown = re.search(
        r"<!-- output of trajkit check -->\n```none\n(.*?)```", README, re.S
    )
    assert printed[1] == shown[1]
    turns = tk.read_turns("log.parquet")
    assert turns["session_id"].unique().to_pylist() == [
        *("agent-1", "agent-2", "agent-3")
    ]
    assert "</html>" in Path("page.html").read_text("utf-8")
