"""The agent of the training demo, which speaks to the gateway over HTTP."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from trajkit_shim.train.task import MAX_TURNS, TOOLS, Task


class Gateway:
    """A client of one gateway, for agents and for the trainer."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rollouts(self, tasks: Sequence[Task], samples: int, prefix: str) -> list[float]:
        """Have agents work on every task, several on each, all at the same time.

        The sessions are named ``{prefix}.{task}.{sample}``; a task's are a group. Returns
        the rewards, which the gateway logs too.
        """

        async def run() -> list[float]:
            async with httpx.AsyncClient(
                base_url=self._url,
                timeout=None,
                limits=httpx.Limits(max_connections=len(tasks) * samples),
            ) as http:
                return await asyncio.gather(
                    *(
                        _rollout(http, task, f"{prefix}.{task.task_id}", sample)
                        for task in tasks
                        for sample in range(samples)
                    )
                )

        return asyncio.run(run())

    def update(self, path: str, version: str) -> None:
        """Give the engine the weights in a model directory."""
        with httpx.Client(base_url=self._url, timeout=None) as http:
            update = {"model_path": path, "weight_version": version}
            for verb, body in (("pause", {}), ("update", update), ("resume", {})):
                http.post(f"/engine/{verb}", json=body).raise_for_status()


async def _rollout(
    http: httpx.AsyncClient, task: Task, group_id: str, sample: int
) -> float:
    """One agent at work on a task, from opening its session to its reward."""
    opening = {
        "session_id": f"{group_id}.{sample}",
        "group_id": group_id,
        "max_turns": MAX_TURNS,
    }
    session = await _post(http, "/sessions", opening)
    key = {"authorization": f"Bearer {session['api_key']}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    answer = ""
    for turn in range(MAX_TURNS):
        body = {
            "model": "policy",
            "messages": messages,
            "tools": TOOLS,
            "seed": hash_of(f"{group_id}.{sample}.{turn}"),
        }
        reply = await _post(http, "/v1/chat/completions", body, key)
        message = reply["choices"][0]["message"]
        # like most clients, it does not send the reasoning back
        messages.append({k: v for k, v in message.items() if k in _SENT and v})
        calls = message.get("tool_calls") or []
        if not calls:
            answer = message.get("content") or ""
            break
        for call in calls:
            function = call["function"]
            result = task.call(function["name"], function["arguments"])
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
            )
    reward = float(answer == task.answer)
    await _post(
        http, f"/sessions/{session['session_id']}/finish", {"reward": reward}
    )
    return reward


_SENT = ("role", "content", "tool_calls")


def hash_of(text: str) -> int:
    """A seed from a text, the same in every process."""
    import zlib

    return zlib.crc32(text.encode())


async def _post(
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> Any:
    answer = await http.post(path, json=body, headers=headers)
    answer.raise_for_status()
    return answer.json()
