"""``trajkit demo``: real coding agents on the gateway, and the resulting rows.

Agents of mini-swe-agent, on the embedded engine, do what real agents do: they make an
invalid call and are asked again, lose a reply and repeat the request (a retry), start a
second agent (a sub-agent), and get every reply back slightly changed (drift).
"""

import io
import itertools
import json as json_text
import shlex
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import trajkit as tk
from trajkit.cli import main
from trajkit.cli.screen import text_table
from trajkit.policies import PRESETS
from trajkit_rollout.rollout import Rollouts
from trajkit_rollout.sandbox import pack, program
from trajkit_rollout.settings import HARNESSES, Settings
from trajkit_rollout.tasks import Task, read_tasks
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines import embedded
from trajkit_shim.engines.embedded import Policy, Reply, acts
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# index of the reply that each session loses
_LOST = 3
# the sub-agent works while a command of the first agent runs
_OPTIONS = ("-c", "environment.timeout=240", "-c", "agent.step_limit=30")
# tools that run a shell command, with the name of the argument
_SHELLS = {
    **dict.fromkeys(("run_shell_command", "Bash", "bash"), "command"),
    "exec_command": "cmd",
}

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Informs mini-swe-agent that the work is done."""

REVIEWER = "You review a change that another agent made."
"""The system prompt of the reviewing agent."""

# without a valid tool call
_SLIP = [
    Reply(("I will change it.",)),
    Reply(("The change next.\n", *embedded.tool_call("bash", '{"command": "python'))),
]
_REVIEW = [
    acts(["Let me see the change.\n", "The diff first.\n\n"], ["git diff"]),
    acts(["The change is sound.\n", "I have no objection.\n"], [f"echo {SUBMIT}"]),
]
_ASK = acts(
    ["I would like another pair of eyes on this.\n", "Does it hold?\n"],
    ["./subagent 'Review the uncommitted change.'"],
)


def solve(tasks: Sequence[Task], odds: float) -> Policy:
    """Return the embedded engine's policy that solves tasks with the probability ``odds``.

    It looks at the files, writes the solution or not, looks again, and ends. Other prompts,
    and those without a tool that runs a shell command, get a word.
    """
    look = "git status --short"
    known = [(task.prompt.strip(), _edit(task)) for task in tasks]

    def policy(prompt: str) -> list[Reply]:
        read = embedded.messages(prompt)
        user_text = "\n".join(m.text for m in read if m.role == "user")
        offered = read[0].text if read else ""
        shells = (item for item in _SHELLS.items() if f'"name": "{item[0]}"' in offered)
        shell = next(shells, None)
        edit = next((edit for text, edit in known if text in user_text), None)
        if shell is None or edit is None:
            return [Reply(("Fine.",))]
        begin = ["Let me see what is there.\n", "First, the files.\n\n"]
        again = ["What did I change?\n", " Let me look once more.\n"]
        (write,) = acts(["This should mend it.\n"], [edit or look], shell)
        (leave,) = acts(["I find nothing wrong with it.\n"], [look], shell)
        change = write._replace(weight=odds), leave._replace(weight=1 - odds)
        end = [Reply(("That is all.",)), Reply((" I am done.",))]
        if any(SUBMIT in m.text for m in read):
            end = acts(["Done.\n\n"], [f"echo {SUBMIT}"], shell)
        steps = [
            acts(begin, ["ls && cat *.py", "cat *.py"], shell),
            [reply for reply in change if reply.weight > 0],
            acts(again, ["git diff"], shell),
            end,
        ]
        return steps[min(embedded.n_responses(read), 3)]

    return policy


def _edit(task: Task) -> str:
    """A command that writes the task's solution; empty: there is none."""
    return "\n".join(
        f"cat > {shlex.quote(name)} <<'END_OF_FILE'\n{text.decode()}END_OF_FILE"
        for name, text in unpack(task.solution).items()
    )


def unpack(archive: bytes | None) -> dict[str, bytes]:
    """Return the files of a tar archive by path."""
    if archive is None:
        return {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [(entry.name, tar.extractfile(entry)) for entry in tar]
        return {n.removeprefix("./"): f.read() for n, f in files if f is not None}


def run_demo(
    out: str | Path, *, sessions: int = 4, seed: int | None = None, json: bool = False
) -> int:
    """Record a run of real agents, turn it into rows, and print a summary.

    ``out`` gets the turn log, the rows of each policy, and in ``agents`` what `trajkit
    rollout` writes; it must not contain a run. Every second agent finds the solution.
    Returns 0; 1 if an agent failed. Raises `SandboxError` if no agent can run here.
    """
    if sessions < 1:
        raise ValueError(f"sessions = {sessions}: at least 1 is needed")
    task = _task()
    engine = embedded.EmbeddedEngine(write_code(task), seed=seed)
    renderer = embedded_renderer()  # before the folder, for a package may be missing
    out = Path(out)
    log = TurnLog(out)
    # rendered prompts drift, which the demo is to show
    gateway = create_app(engine, renderer, log, Options(prompts="render"))
    settings = Settings(
        harness="mini-swe-agent", argument=_OPTIONS, repeat=sessions, parallel=sessions
    )
    with (
        Rollouts([task], settings, out / "agents") as rollouts,
        running(lossy(gateway, _LOST)) as url,
    ):
        rollouts.try_out()
        ended = rollouts.run(url)
    # so that commands show text
    tokenizer = out / "tokenizer.json"
    embedded.chat_files()[0].save(str(tokenizer))
    turns, table = tk.read_turns(log.path), out / "agents/sessions.parquet"
    graded = tk.read_sessions(table)
    for policy in PRESETS:
        rows = tk.linearize(turns, policy, sessions=graded)
        tk.write_rows(rows, out / f"rows-{policy}.parquet")
    head, lines = ("session_id", "end", "turns"), []
    for rollout in ended:
        end = rollout.error or ("solved" if rollout.reward == 1 else "unsolved")
        lines.append((rollout.session_id, end, rollout.turns or 0))
    if json:
        told = [dict(zip(head, line, strict=True)) for line in lines]
        facts = {"turns": str(log.path), "sessions": told}
        sys.stdout.write(json_text.dumps(facts) + "\n")
    else:
        sys.stdout.write(f"{text_table(head, lines)}\n")
        run, file = shlex.quote(str(out)), shlex.quote(str(table))
        for command in (f"drift {run}", f"simulate {run} --sessions {file}"):
            sys.stdout.write(f"\n$ trajkit {command}\n")
            main(shlex.split(command))
        sys.stdout.write(
            f"\nrows      {out}/rows-POLICY.parquet\nagents    {out}/agents\n"
            f"tokenizer {tokenizer} (--tokenizer, for files elsewhere)\n"
        )
    return 0 if all(rollout.error is None for rollout in ended) else 1


def _task() -> Task:
    (task,) = read_tasks(Path(__file__).parent / "median")
    reviewer = (*_OPTIONS, "-c", f"agent.system_template={REVIEWER}")
    values = dict.fromkeys(("base_url", "api_key", "prompt", "workspace"), "")
    values |= {"model": "trajkit-embedded", "home": "/tmp"}
    (*command, _), *_ = HARNESSES["mini-swe-agent"].launch(values, reviewer)
    script = program("subagent.sh").replace("{command}", shlex.join(command))
    return replace(
        task, workspace=pack({**unpack(task.workspace), "subagent": script.encode()})
    )


def write_code(task: Task) -> Policy:
    """Return the policy of the demo's agents.

    It slips, solves the task in every second session, and asks for a review.
    """
    solves = solve([task], 1.0)
    edits = itertools.cycle([solves, solve([task], 0.0)])

    def policy(prompt: str) -> Sequence[Reply]:
        read = embedded.messages(prompt)
        done = embedded.n_responses(read)
        if read[0].text.startswith(REVIEWER):
            return _REVIEW[min(done, 1)]
        if done == 1 and not any(m.text.startswith("Tool call error") for m in read):
            return _SLIP
        if done == 1:
            return next(edits)(prompt)
        return _ASK if done == 3 else solves(prompt)

    return policy


def lossy(app: ASGIApp, lost: int) -> ASGIApp:
    """Forward requests and lose one reply of each API key, like a proxy that times out.

    The client gets status 504 and repeats the request, as many do without a header that
    says so. ``lost`` is the index of the chat completion.
    """
    seen = Counter[bytes]()

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("path", "").endswith("/chat/completions"):
            await app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        headers.pop(b"x-stainless-retry-count", None)
        key = headers.get(b"authorization", b"")
        loses = seen[key] == lost
        seen[key] += 1

        async def answer(message: Message) -> None:
            if not loses:
                await send(message)

        await app({**scope, "headers": [*headers.items()]}, receive, answer)
        if loses:
            error = {"error": {"message": "the upstream timed out"}}
            await JSONResponse(error, 504)(scope, receive, send)

    return forward
