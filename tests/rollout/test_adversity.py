"""Agents, verifiers and tasks that do what nobody should."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.rollout.test_sandbox import sandbox
from trajkit.errors import FormatError
from trajkit_rollout.grade import Workspace
from trajkit_rollout.rollout import Callback
from trajkit_rollout.sandbox import remove
from trajkit_rollout.tasks import Grade, Task, archive_of, read_tasks


def test_a_line_of_tasks_ends_where_json_says_so(tmp_path):
    path = tmp_path / "tasks.jsonl"
    task = {"id": "a", "prompt": "one\u2028two\x85", "grade": {"command": "true"}}
    path.write_text(json.dumps(task, ensure_ascii=False) + "\r\n", newline="")
    (read,) = read_tasks(path)
    assert read.prompt == task["prompt"]
    path.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(FormatError, match=r"tasks\.jsonl: .*utf-8"):
        read_tasks(path)


COMMIT = "git add -A && git -c user.name=a -c user.email=a@localhost commit -qm x"


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ("printf '* text=auto\\n' > .gitattributes", "printf 'a\\r\\nb\\r\\n' > a"),
        (
            "printf '* text=auto\\n' > .gitattributes; printf 'a\\r\\n' > a",
            "printf 'a\\n' > a",
        ),
        (
            "printf '* ident\\n' > .gitattributes; echo '$Id: x $' > a",
            "echo '$Id: y $' > a; echo z >> a",
        ),
        ("true", "git init -q b && echo b > b/a"),
        ("true", f"git init -q b && cd b && echo b > a && {COMMIT}"),
        (f"git init -q b; cd b; echo b > a; {COMMIT}", "echo c > b/a"),
        ("mkdir a d; echo b > a/c; echo e > d/f", "rm -r a; ln -s d a"),
        (
            "true",
            "mkdir 'x y'; printf b > \"x y/q'\\\"\n\"; printf '\\0\\377' > -f; "
            "ln -s nowhere l; mkfifo pipe",
        ),
    ],
    ids=["crlf", "line ends", "ident", "empty", "nested", "within", "link", "odd"],
)
def test_what_an_agent_leaves_is_what_is_graded(tmp_path, before, change):
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(["sh", "-c", before], cwd=source, check=True)
    rules = Grade(kind="completed")
    task = Task(
        id="t",
        prompt="p",
        workspace=archive_of(source),
        grade=rules,
        editable=("**",),
    )
    # git knows no directories; what a repository's own one holds is not the workspace's
    look = (
        "find . -name .git -prune -o -type l -print -o -type f -print0 | sort -z | "
        "xargs -0 md5sum"
    )

    one, other = (sandbox("local", tmp_path, name=name) for name in ("agent", "copy"))
    with one as agent, other as copy:
        work, fresh = Workspace(task, agent), Workspace(task, copy)
        work.prepare()
        fresh.prepare()
        made = agent.exec(["sh", "-c", change], timeout_s=60, cwd=work.path)
        assert made.code == 0, made.stderr
        fresh.apply(work.diff())
        shell = ["sh", "-c", look]
        left = agent.exec(shell, timeout_s=60, cwd=work.path).stdout
        assert copy.exec(shell, timeout_s=60, cwd=fresh.path).stdout == left
        # nothing stays put aside
        assert not agent.exec(["find", "-name", "*~*"], timeout_s=60).stdout


@pytest.mark.parametrize("url", ["http://host:port", "localhost:9000"])
def test_a_callback_that_is_no_url_is_told_before_anything_runs(url):
    with pytest.raises(ValueError, match=f"--callback '{url}': "):
        Callback(url)


def test_directories_that_an_agent_closed_are_removed(tmp_path, monkeypatch):
    # a directory around it may be closed to the user whom modes hold back
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
    try:
        root, outside = Path("root"), Path("outside")
        outside.mkdir(mode=0o755)
        (root / "a/b").mkdir(parents=True)
        (root / "a/b/c").write_text("c")
        (outside / "kept").touch()
        (root / "link").symlink_to("../outside")
        os.chmod(root / "a/b", 0)
        os.chmod(root / "a", 0o555)
        remove(root)
        assert not root.exists()
        assert stat.S_IMODE(os.stat(outside).st_mode) == 0o755
        assert (outside / "kept").exists()
    finally:
        os.seteuid(user)
