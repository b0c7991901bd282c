"""The agent of the training demo, which speaks to the gateway over HTTP."""

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pyarrow as pa

from trajkit.schema import SESSIONS
from trajkit_shim.train.task import MAX_TURNS, TOOLS, Task

# like most clients, the agent does not send the reasoning of a reply back
_SENT_BACK = ("role", "content", "tool_calls")


class Gateway:
    """A client of one gateway, for agents and for the trainer."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(
            base_url=url, timeout=None, limits=limits, trust_env=False
        )

    def rollouts(self, tasks: Sequence[Task], samples: int) -> pa.Table:
        """Have ``samples`` agents work on each task, all at the same time.

        The sessions of a task are a group of its name. Returns
        `trajkit.schema.SESSIONS` with their rewards, which the gateway logs, too.
        """
        jobs = [(task, sample) for task in tasks for sample in range(samples)]
        with ThreadPoolExecutor(len(jobs), "agent") as pool:
            ended = list(pool.map(lambda job: self._rollout(*job), jobs))
        return pa.Table.from_pylist(ended, SESSIONS)

    def update(self, path: str, version: str) -> None:
        """Give the engine the weights in a model directory."""
        self._post("/engine/pause", {})
        self._post("/engine/update", {"model_path": path, "weight_version": version})
        self._post("/engine/resume", {})

    def _rollout(self, task: Task, sample: int) -> dict[str, Any]:
        """One agent at work on a task, from opening its session to its reward."""
        name = f"{task.task_id}.{sample}"
        opening = {
            "session_id": name,
            "group_id": task.task_id,
            "max_turns": MAX_TURNS,
        }
        key = self._post("/sessions", opening)["api_key"]
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        answer = None
        for turn in range(MAX_TURNS):
            # a seed of its own makes a call independent of the order of all calls
            seed = zlib.crc32(f"{name}.{turn}".encode())
            request = {"messages": messages, "tools": TOOLS, "seed": seed}
            reply = self._post(
                "/v1/chat/completions", {"model": "policy", **request}, key
            )
            message = reply["choices"][0]["message"]
            messages.append({key: message.get(key) for key in _SENT_BACK})
            calls = message.get("tool_calls")
            if not calls:
                answer = message["content"]
                break
            for call in calls:
                result = task.call(**call["function"])
                messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
        reward = float(answer == task.answer)
        self._post(f"/sessions/{name}/finish", {"reward": reward})
        return {"session_id": name, "group_id": task.task_id, "reward": reward}

    def _post(self, path: str, body: dict[str, Any], key: str = "") -> Any:
        """The JSON answer to a request."""
        headers = {"x-session-key": key}
        answer = self._client.post(path, json=body, headers=headers)
        if answer.is_error:
            raise ConnectionError(f"POST {path}: {answer.status_code} {answer.text}")
        return answer.json()
