"""The demo's scripted model: a policy that reads the conversation and fixes the bug.

It sees only the prompt's text. The number of tool responses gives its progress, the file
named in the first request its task, and the system prompt its role.
"""

from collections.abc import Sequence

from trajkit_shim.demo.tasks import TASKS, Task
from trajkit_shim.engines.embedded import Reply, tool_call
from trajkit_shim.engines.embedded.script import acts, messages, n_responses

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
    done = n_responses(read)
    if read[0].text.startswith(REVIEWER):
        return _review(task)[done]
    slipped = any(m.text.startswith("Tool call error") for m in read)
    return _work(task, slipped)[done]


def _work(task: Task, slipped: bool) -> list[list[Reply]]:
    """The possible replies after 0, 1, 2, ... tool responses."""
    test = f"python test_{task.module}"
    look = acts(
        [
            "Let me look at the code and its test first.\n",
            "I will read the module before I change anything.\n\n",
            "First, the files.",
        ],
        [f"cat {task.module} test_{task.module}", f"ls && cat {task.module}"],
    )
    before = acts(
        ["Now I run the test to see it fail.\n", "The test should show it.\n\n"], [test]
    )
    if task.slips and not slipped:
        # without a valid tool call
        torn = tool_call("bash", '{"command": "' + test)
        before = [
            Reply((f"I will run the test: `{test}`",)),
            Reply(("The test next.\n", *torn)),
        ]
    edit = acts(
        [
            f"The fault is plain. I replace that line of {task.module}.\n",
            f"I see what is wrong in `{task.module}`; this should mend it:\n\n",
        ],
        [
            "python - <<'EOF'\nfrom pathlib import Path\n"
            f"path = Path({task.module!r})\n"
            f"path.write_text(path.read_text().replace({task.wrong!r}, {task.right!r}))\n"
            "EOF",
            f"cat > {task.module} <<'EOF'\n{task.fixed}EOF",
        ],
    )
    after = acts(
        ["The test again.\n", "Does it hold?\n", " Let me check that it passes now.\n"],
        [test, f"{test} && git diff --stat"],
    )
    review = acts(
        ["I would like another pair of eyes on this.\n"],
        [f"subagent 'Review the uncommitted change in {task.module}.'"],
    )
    submit = acts(["It passes, so I am done.\n", "Done.\n\n"], [SUBMIT])
    return [look, before, edit, after, *([review] if task.reviews else []), submit]


def _review(task: Task) -> list[list[Reply]]:
    return [
        acts(["Let me see the change.\n", "The diff first.\n\n"], ["git diff"]),
        acts([f"I run test_{task.module} myself.\n"], [f"python test_{task.module}"]),
        acts(["The change is sound.\n", "I have no objection.\n"], [SUBMIT]),
    ]
