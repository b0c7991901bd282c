"""The demo's scripted model: it solves the task, after a slip, and asks for a review."""

from collections.abc import Sequence

from trajkit_shim.engines.embedded import Policy, Reply, tool_call
from trajkit_shim.engines.embedded.script import acts, messages, n_responses
from trajkit_shim.rollout.solver import SUBMIT, solve
from trajkit_shim.rollout.tasks import Task

REVIEWER = "You review a change that another agent made."
"""The system prompt of the reviewing agent."""

# without a valid tool call
_SLIP = [
    Reply(("I will change it.",)),
    Reply(("The change next.\n", *tool_call("bash", '{"command": "python'))),
]
_REVIEW = [
    acts(["Let me see the change.\n", "The diff first.\n\n"], ["git diff"]),
    acts(["The change is sound.\n", "I have no objection.\n"], [f"echo {SUBMIT}"]),
]
_ASK = acts(
    ["I would like another pair of eyes on this.\n", "Does it hold?\n"],
    ["./subagent 'Review the uncommitted change.'"],
)


def write_code(tasks: Sequence[Task]) -> Policy:
    """Return the policy of the demo's agents."""
    solves = solve(tasks, 1.0)

    def policy(prompt: str) -> Sequence[Reply]:
        read = messages(prompt)
        done = n_responses(read)
        if read[0].text.startswith(REVIEWER):
            return _REVIEW[min(done, 1)]
        slipped = any(m.text.startswith("Tool call error") for m in read)
        if done == 1 and not slipped:
            return _SLIP
        return _ASK if done == 3 else solves(prompt)

    return policy
