"""The embedded engine's policy for tasks that have a solution.

It looks at the files, writes the solution or not, looks again, and ends. It recognizes
its task by the task's text, and its progress by the tool responses.
"""

import shlex
from collections.abc import Sequence

from trajkit_rollout.sandbox import unpack
from trajkit_rollout.tasks import Task
from trajkit_shim.engines.embedded import Policy, Reply, acts, messages, n_responses

# tools that run a shell command, with the name of the argument
_SHELLS = (
    ("exec_command", "cmd"),
    ("run_shell_command", "command"),
    ("Bash", "command"),
    ("bash", "command"),
)
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Informs mini-swe-agent that the work is done."""


def solve(tasks: Sequence[Task], odds: float) -> Policy:
    """Return a policy that solves tasks with the probability ``odds``.

    It replies with one word if a prompt is about none of the tasks, or offers no tool
    that runs a shell command.
    """
    known = [(task.prompt.strip(), _edit(task)) for task in tasks]

    def policy(prompt: str) -> list[Reply]:
        read = messages(prompt)
        user_text = "\n".join(m.text for m in read if m.role == "user")
        offered = read[0].text if read else ""
        shell = next((s for s in _SHELLS if f'"name": "{s[0]}"' in offered), None)
        edit = next((edit for text, edit in known if text in user_text), None)
        if shell is None or edit is None:
            return [Reply(("Fine.",))]
        done = n_responses(read)
        submits = any(SUBMIT in m.text for m in read)
        steps = _steps(shell, edit, odds, submits)
        return steps[min(done, len(steps) - 1)]

    return policy


def _steps(
    shell: tuple[str, str], edit: str | None, odds: float, submits: bool
) -> list[list[Reply]]:
    """The possible replies after 0, 1, 2, ... tool responses."""
    look = acts(
        ["Let me see what is there.\n", "First, the files.\n\n"],
        ["ls && cat *.py", "cat *.py"],
        shell,
    )
    (leave,) = acts(["I find nothing wrong with it.\n"], ["git status --short"], shell)
    change = [leave]
    if edit is not None:
        (write,) = acts(["This should mend it.\n"], [edit], shell)
        weighted = write._replace(weight=odds), leave._replace(weight=1 - odds)
        change = [reply for reply in weighted if reply.weight > 0]
    thoughts = ["What did I change?\n", " Let me look once more.\n"]
    again = acts(thoughts, ["git diff"], shell)
    end = [Reply(("That is all.",)), Reply((" I am done.",))]
    if submits:
        end = acts(["Done.\n\n"], [f"echo {SUBMIT}"], shell)
    return [look, change, again, end]


def _edit(task: Task) -> str | None:
    if task.solution is None:
        return None
    files = unpack(task.solution.archive()).items()
    return "\n".join(
        f"cat > {shlex.quote(name)} <<'END_OF_FILE'\n{text.decode()}END_OF_FILE"
        for name, text in files
    )
