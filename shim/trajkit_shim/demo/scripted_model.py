"""The demo's scripted model: a policy that reads the conversation and fixes the bug.

It sees only the prompt's text. The number of tool responses gives its progress, the file
named in the first request its task, and the system prompt its role.
"""

import itertools
import json
from collections.abc import Sequence

from trajkit_shim.demo.tasks import TASKS, Task
from trajkit_shim.engines.embedded import Reply, tool_call
from trajkit_shim.engines.embedded.script import messages

REVIEWER = "You review a change that another agent made."
"""The system prompt of the reviewing agent."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def write_code(prompt: str) -> Sequence[Reply]:
    """Return the possible replies to a prompt of the demo's agents.

    Raises `ValueError` if the prompt names none of the demo's tasks.
    """
    read = messages(prompt)
    user_text = next((m.text for m in read if m.role == "user"), "")
    task = next((task for task in TASKS if task.module in user_text), None)
    if task is None:
        raise ValueError(f"no task of the demo is named in {user_text[:80]!r}")
    done = sum(m.text.startswith("<tool_response>") for m in read)
    if read[0].text.startswith(REVIEWER):
        return _review(task)[done]
    slipped = any(m.text.startswith("Tool call error") for m in read)
    return _work(task, slipped)[done]


def _work(task: Task, slipped: bool) -> list[list[Reply]]:
    """The possible replies after 0, 1, 2, ... tool responses."""
    test = f"python test_{task.module}"
    look = _acts(
        [
            "Let me look at the code and its test first.\n",
            "I will read the module before I change anything.\n\n",
            "First, the files.",
        ],
        [f"cat {task.module} test_{task.module}", f"ls && cat {task.module}"],
    )
    before = _acts(
        ["Now I run the test to see it fail.\n", "The test should show it.\n\n"], [test]
    )
    edit = _acts(
        [
            f"The fault is plain. I replace that line of {task.module}.\n",
            f"I see what is wrong in `{task.module}`; this should mend it:\n\n",
        ],
        [_replace(task), _rewrite(task)],
    )
    after = _acts(
        ["The test again.\n", "Does it hold?\n", " Let me check that it passes now.\n"],
        [test, f"{test} && git diff --stat"],
    )
    review = _acts(
        ["I would like another pair of eyes on this.\n"],
        [f"subagent 'Review the uncommitted change in {task.module}.'"],
    )
    submit = _acts(["It passes, so I am done.\n", "Done.\n\n"], [SUBMIT])
    if task.slips and not slipped:
        before = _slips(test)
    return [look, before, edit, after, *([review] if task.reviews else []), submit]


def _review(task: Task) -> list[list[Reply]]:
    return [
        _acts(["Let me see the change.\n", "The diff first.\n\n"], ["git diff"]),
        _acts([f"I run test_{task.module} myself.\n"], [f"python test_{task.module}"]),
        _acts(["The change is sound.\n", "I have no objection.\n"], [SUBMIT]),
    ]


def _acts(thoughts: list[str], commands: list[str]) -> list[Reply]:
    """Each thought with each command, with equal probability."""
    return [
        Reply((thought, *tool_call("bash", json.dumps({"command": command}))))
        for thought, command in itertools.product(thoughts, commands)
    ]


def _slips(command: str) -> list[Reply]:
    """Replies without a valid tool call."""
    return [
        Reply(("I will run the test: `" + command + "`",)),
        Reply(("The test next.\n", *tool_call("bash", '{"command": "' + command))),
    ]


def _replace(task: Task) -> str:
    return (
        "python - <<'EOF'\n"
        "from pathlib import Path\n"
        f"path = Path({task.module!r})\n"
        f"path.write_text(path.read_text().replace({task.wrong!r}, {task.right!r}))\n"
        "EOF"
    )


def _rewrite(task: Task) -> str:
    return f"cat > {task.module} <<'EOF'\n{task.fixed}EOF"
