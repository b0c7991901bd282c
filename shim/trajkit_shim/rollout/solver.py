"""The embedded engine's policy for tasks that have a solution.

It looks at the files, writes the solution or not, looks again, and ends. It recognizes
its task by the task's text, and its progress by the tool responses.
"""

import itertools
import json
import shlex
import tarfile
from collections.abc import Sequence
from io import BytesIO

from trajkit_shim.engines.embedded import Policy, Reply, Special, tool_call
from trajkit_shim.engines.embedded.script import messages
from trajkit_shim.rollout.tasks import Task

# tools that run a shell command, with the name of the argument
_SHELLS = (
    ("exec_command", "cmd"),
    ("run_shell_command", "command"),
    ("Bash", "command"),
    ("bash", "command"),
)
# informs mini-swe-agent that the work is done
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def solve(tasks: Sequence[Task], odds: float = 0.75) -> Policy:
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
        done = sum(m.text.startswith("<tool_response>") for m in read)
        submits = any(_SUBMIT in m.text for m in read)
        steps = _steps(shell, edit, odds, submits)
        return steps[min(done, len(steps) - 1)]

    return policy


def _steps(
    shell: tuple[str, str], edit: str | None, odds: float, submits: bool
) -> list[list[Reply]]:
    """The possible replies after 0, 1, 2, ... tool responses."""

    def acts(thoughts: Sequence[str], commands: Sequence[str]) -> list[Reply]:
        each = itertools.product(thoughts, commands)
        return [Reply((thought, *_call(shell, command))) for thought, command in each]

    look = acts(
        ["Let me see what is there.\n", "First, the files.\n\n"],
        ["ls && cat *.py", "cat *.py"],
    )
    leave = acts(["I find nothing wrong with it.\n"], ["git status --short"])
    write = [] if edit is None else acts(["This should mend it.\n"], [edit])
    change = [
        Reply(reply.parts, weight / len(replies))
        for replies, weight in (
            (write, odds),
            (leave, 1.0 if edit is None else 1 - odds),
        )
        for reply in replies
        if weight > 0
    ]
    again = acts(["What did I change?\n", " Let me look once more.\n"], ["git diff"])
    end = [Reply(("That is all.",)), Reply((" I am done.",))]
    if submits:
        end = acts(["Done.\n\n"], [f"echo {_SUBMIT}"])
    return [look, change, again, end]


def _call(shell: tuple[str, str], command: str) -> tuple[str | Special, ...]:
    name, argument = shell
    return tool_call(name, json.dumps({argument: command}))


def _edit(task: Task) -> str | None:
    """A shell command that writes the task's solution."""
    if task.solution is None:
        return None
    commands = []
    with tarfile.open(fileobj=BytesIO(task.solution.archive())) as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            if content is not None:
                text = content.read().decode()
                name = shlex.quote(entry.name.removeprefix("./"))
                commands.append(f"cat > {name} <<'END_OF_FILE'\n{text}END_OF_FILE")
    return "\n".join(commands)
