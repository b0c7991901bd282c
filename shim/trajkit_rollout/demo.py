"""``trajkit demo``: real coding agents on the gateway, and the resulting rows.

mini-swe-agent works on a small task in sandboxes, against the gateway with the embedded
engine. The agents do what real agents do: they make an invalid call and are asked again,
lose a reply and repeat the request (a retry), start a second agent (a sub-agent), and
their client and the chat template return every reply slightly changed (drift).
"""

import itertools
import json as json_text
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import trajkit as tk
from trajkit.cli import main
from trajkit.cli.screen import text_table
from trajkit.policies import PRESETS
from trajkit.schema import LABELS
from trajkit_rollout.rollout import HARNESSES, Rollout, Rollouts, Settings
from trajkit_rollout.sandbox import pack, unpack
from trajkit_rollout.tasks import Task, read_tasks
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines.embedded import (
    EmbeddedEngine,
    Policy,
    Reply,
    acts,
    chat_files,
    messages,
    n_responses,
    tool_call,
)
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# index of the reply that each session loses
_LOST = 3
# the sub-agent works while a command of the first agent runs
_OPTIONS = ("-c", "environment.timeout=240", "-c", "agent.step_limit=30")
_SUBAGENT = """#!/bin/sh
# subagent TASK: a second agent, with another system prompt, on the same session
{command} "$1" > "$TMPDIR/log" 2>&1
code=$?
tail -n 20 "$TMPDIR/log"
exit $code
"""
# tools that run a shell command, with the name of the argument
_SHELLS = {
    "exec_command": "cmd",
    "run_shell_command": "command",
    "Bash": "command",
    "bash": "command",
}

MINI_SWE_AGENT = HARNESSES["mini-swe-agent"]

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Informs mini-swe-agent that the work is done."""

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


def solve(tasks: Sequence[Task], odds: float) -> Policy:
    """Return the embedded engine's policy that solves tasks with the probability ``odds``.

    It looks at the files, writes the solution or not, looks again, and ends. It recognizes
    its task by the task's text, and its progress by the tool responses. It replies with
    one word if a prompt is about none of the tasks, or offers no tool that runs a shell
    command.
    """
    look = "git status --short"
    known = [(task.prompt.strip(), _edit(task)) for task in tasks]

    def policy(prompt: str) -> list[Reply]:
        read = messages(prompt)
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
        return steps[min(n_responses(read), 3)]

    return policy


def _edit(task: Task) -> str:
    """A command that writes the task's solution; empty: there is none."""
    files = {} if task.solution is None else unpack(task.solution)
    return "\n".join(
        f"cat > {shlex.quote(name)} <<'END_OF_FILE'\n{text.decode()}END_OF_FILE"
        for name, text in files.items()
    )


def run_demo(
    out: str | Path, *, sessions: int = 4, seed: int | None = None, json: bool = False
) -> int:
    """Record a run of real agents, turn it into rows, and print a summary.

    ``out`` gets the turn log, the rows of each policy, and in ``agents`` what `trajkit
    rollout` writes; it must not contain a run. ``seed`` is that of the engine; with
    several ``sessions``, concurrent agents, the order of their calls matters too.
    All of them work on one task; every second one finds its solution.
    ``json`` prints one JSON object, how the agents ended, instead of tables. Returns 0; 1
    if an agent failed. Raises `SandboxError` if no agent can run here.
    """
    if sessions < 1:
        raise ValueError(f"sessions = {sessions}: at least 1 is needed")
    task = _task()
    engine = EmbeddedEngine(write_code(task), seed=seed)
    renderer = embedded_renderer()  # before the folder, for a package may be missing
    out = Path(out)
    log = TurnLog(out)
    # rendered prompts drift, which the demo is to show
    gateway = create_app(engine, renderer, log, Options(prompts="render"))
    settings = Settings(
        harness=MINI_SWE_AGENT, argument=_OPTIONS, repeat=sessions, parallel=sessions
    )
    with (
        Rollouts([task], settings, out / "agents") as rollouts,
        running(lossy(gateway, _LOST)) as url,
    ):
        rollouts.try_out()
        ended = rollouts.run(url)
    # so that commands show text
    tokenizer = out / "tokenizer.json"
    chat_files()[0].save(str(tokenizer))
    turns, table = tk.read_turns(log.path), out / "agents/sessions.parquet"
    graded = tk.read_sessions(table)
    for policy in PRESETS:
        rows = tk.linearize(turns, policy, sessions=graded)
        tk.write_rows(rows, out / f"rows-{policy}.parquet")
    lines = _sessions(turns, ended)
    if json:
        facts = {"turns": str(log.path), "sessions": lines}
        sys.stdout.write(json_text.dumps(facts) + "\n")
    else:
        shown = text_table([*lines[0]], [[*line.values()] for line in lines])
        sys.stdout.write(f"{shown}\n")
        run, ends = shlex.quote(str(out)), shlex.quote(str(table))
        for command in (f"drift {run}", f"simulate {run} --sessions {ends}"):
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
    *command, _ = MINI_SWE_AGENT.launch(values, reviewer).command
    subagent = _SUBAGENT.format(command=shlex.join(command)).encode()
    files = unpack(task.workspace or b"")
    return replace(task, workspace=pack({**files, "subagent": subagent}))


def _sessions(turns: pa.Table, rollouts: list[Rollout]) -> list[dict[str, Any]]:
    links = tk.link(turns)
    drift = tk.classify_drift(turns, links)
    drift = drift.filter(pc.greater(drift["size"], 0))
    drifting = Counter(drift["session_id"].to_pylist())
    branches = tk.analysis.label_branches(turns, links).to_pylist()
    labels = Counter((line["session_id"], line["label"]) for line in branches)
    return [
        {
            "session_id": rollout.session_id,
            "end": rollout.error or ("solved" if rollout.reward == 1 else "unsolved"),
            "turns": rollout.turns,
            "drifting": drifting[rollout.session_id],
            **{label: labels[rollout.session_id, label] for label in LABELS},
        }
        for rollout in rollouts
    ]


def write_code(task: Task) -> Policy:
    """Return the policy of the demo's agents.

    It slips, solves the task in every second session, and asks for a review.
    """
    solves = solve([task], 1.0)
    edits = itertools.cycle([solves, solve([task], 0.0)])

    def policy(prompt: str) -> Sequence[Reply]:
        read = messages(prompt)
        done = n_responses(read)
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

    The gateway has answered by then. The client gets status 504 instead and repeats the
    request. The proxy removes its retry header, as many clients send none, so the
    gateway samples again. ``lost`` is the index of the chat completion to lose.
    """
    seen = Counter[str]()

    async def swallow(message: Message) -> None:
        """Discard a lost reply."""

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        loses = False
        if scope.get("path", "").endswith("/chat/completions"):
            headers = dict(scope["headers"])
            headers.pop(b"x-stainless-retry-count", None)
            scope = {**scope, "headers": list(headers.items())}
            key = headers.get(b"authorization", b"").decode()
            loses = seen[key] == lost
            seen[key] += 1
        await app(scope, receive, swallow if loses else send)
        if loses:
            error = {"error": {"message": "the upstream timed out"}}
            await JSONResponse(error, 504)(scope, receive, send)

    return forward
