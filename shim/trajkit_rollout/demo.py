"""``trajkit demo``: real coding agents on the gateway, and the resulting rows.

Agents of mini-swe-agent work on one task, on the embedded engine. As with real engines,
replies come back slightly changed when the next prompt is rendered (drift).
"""

import io
import itertools
import json as json_text
import shlex
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import trajkit as tk
from trajkit.cli import main
from trajkit.cli.screen import text_table
from trajkit.policies import PRESETS
from trajkit_rollout.rollout import Rollouts
from trajkit_rollout.settings import Settings
from trajkit_rollout.tasks import Task, read_tasks
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines import embedded
from trajkit_shim.engines.embedded import Policy, Reply, acts
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# tools that run a shell command, with the name of the argument
_SHELLS = {
    **dict.fromkeys(("run_shell_command", "Bash", "bash"), "command"),
    "exec_command": "cmd",
}

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Informs mini-swe-agent that the work is done."""


def solve(tasks: Sequence[Task], odds: float | None = None) -> Policy:
    """Return the embedded engine's policy that solves tasks with the probability ``odds``.

    Default: in every second session. It looks at the files, writes the solution or not,
    looks again, and ends. Other prompts, and those without a tool that runs a shell
    command, get a word.
    """
    look, turns = "git status --short", itertools.cycle([1.0, 0.0])
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
        # a reply that begins with a space always drifts
        again = [" What did I change?\n", " Let me look once more.\n"]
        (write,) = acts(["This should mend it.\n"], [edit or look], shell)
        (leave,) = acts(["I find nothing wrong with it.\n"], [look], shell)
        step = min(embedded.n_responses(read), 3)
        chance = odds
        if chance is None:
            chance = next(turns) if step == 1 else 1.0
        change = write._replace(weight=chance), leave._replace(weight=1 - chance)
        end = [Reply(("That is all.",)), Reply((" I am done.",))]
        if any(SUBMIT in m.text for m in read):
            end = acts(["Done.\n\n"], [f"echo {SUBMIT}"], shell)
        steps = [
            acts(begin, ["ls && cat *.py", "cat *.py"], shell),
            [reply for reply in change if reply.weight > 0],
            acts(again, ["git diff"], shell),
            end,
        ]
        return steps[step]

    return policy


def _edit(task: Task) -> str:
    """A command that writes the task's solution; empty: there is none."""
    if task.solution is None:
        return ""
    lines = []
    with tarfile.open(fileobj=io.BytesIO(task.solution)) as tar:
        for entry in tar:
            if file := tar.extractfile(entry):
                name = shlex.quote(entry.name.removeprefix("./"))
                lines.append(f"cat > {name} <<'END_OF_FILE'")
                lines.append(f"{file.read().decode()}END_OF_FILE")
    return "\n".join(lines)


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
    (task,) = read_tasks(Path(__file__).parent / "median")
    engine = embedded.EmbeddedEngine(solve([task]), seed=seed)
    renderer = embedded_renderer()  # before the folder, for a package may be missing
    out = Path(out)
    log = TurnLog(out, attributed=True)
    # rendered prompts drift, which the demo is to show
    gateway = create_app(engine, renderer, log, Options(prompts="render"))
    settings = Settings(harness="mini-swe-agent", repeat=sessions, parallel=sessions)
    with (
        Rollouts([task], settings, out / "agents") as rollouts,
        running(gateway) as url,
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
        listed = [dict(zip(head, line, strict=True)) for line in lines]
        facts = {"turns": str(log.path), "sessions": listed}
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
