"""A coding agent of forty lines: a tool that runs shell commands, until it says something.

It finds the gateway and the task in its environment, as the shell harness gives them.
``AGENT_MANNERS`` are what else it does: ``hang`` (never ends), ``fail`` (code 3),
``mute`` (makes no call), ``orphan`` (leaves a process behind).
"""

import json
import os
import subprocess
import sys
import time
import urllib.request

manners = os.environ.get("AGENT_MANNERS", "").split()
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def ask(messages):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "any", "messages": messages, "tools": [TOOL]}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def main():
    messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
    if "mute" in manners:
        return 0
    if "orphan" in manners:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    while True:
        said = ask(messages)
        messages.append(said)
        for call in said.get("tool_calls") or ():
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(
                ["sh", "-c", command], capture_output=True, text=True, check=False
            )
            answer = {"role": "tool", "tool_call_id": call["id"]}
            messages.append({**answer, "content": done.stdout + done.stderr})
        if "hang" in manners:
            time.sleep(600)
        if not said.get("tool_calls"):
            break
    if "fail" in manners:
        sys.stderr.write("I give up\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
