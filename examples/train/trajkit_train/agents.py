"""The agents of the training demo, and the engine that plays their model at first."""

import random
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from trajkit.schema import SESSIONS
from trajkit_shim.client import GatewayClient, OpenSession
from trajkit_shim.engines import base
from trajkit_train.model import END
from trajkit_train.task import MAX_TURNS, TOOLS, Task, scripted_reply

# rollouts at the same time: as many as the engine samples together
_AGENTS = 64
# like most clients, the agent does not send the reasoning of a reply back
_SENT_BACK = ("role", "content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents with two tools. ``gateway``: opens and ends their sessions.

    ``http``: a client that they call the model with.
    """

    gateway: GatewayClient
    http: httpx.Client

    def work(self, tasks: Sequence[Task], samples: int) -> pa.Table:
        """Have ``samples`` agents work on each task, in parallel.

        The sessions of a task are a group of its name. Returns
        `trajkit.schema.SESSIONS` with their rewards, which the gateway logs, too.
        """
        jobs = [(task, sample) for task in tasks for sample in range(samples)]
        with ThreadPoolExecutor(_AGENTS, "agent") as pool:
            ended = list(pool.map(lambda job: self._rollout(*job), jobs))
        return pa.Table.from_pylist(ended, SESSIONS)

    def _rollout(self, task: Task, sample: int) -> dict[str, Any]:
        """One agent at work on a task, from opening its session to its reward."""
        name, group = f"{task.task_id}.{sample}", {"group_id": task.task_id}
        session = self.gateway.open(name, max_turns=MAX_TURNS, **group)
        messages: list[dict[str, Any]]
        messages = [{"role": "user", "content": f"find {task.start}"}]
        answer = None
        for turn in range(MAX_TURNS):
            request = {
                "model": "policy",
                "messages": messages,
                "tools": TOOLS,
                # a seed of its own makes a call independent of the order of all calls
                "seed": zlib.crc32(f"{name}.{turn}".encode()),
            }
            message = self._call(session, request)["choices"][0]["message"]
            messages.append({field: message.get(field) for field in _SENT_BACK})
            if not message.get("tool_calls"):
                answer = message["content"]
                break
            for call in message["tool_calls"]:
                result = {"role": "tool", "tool_call_id": call["id"]}
                messages.append({**result, "content": task.call(**call["function"])})
        reward = float(answer == task.answer)
        self.gateway.finish(name, reward=reward)
        return {"session_id": name, "reward": reward, **group}

    def _call(self, session: OpenSession, request: dict[str, Any]) -> Any:
        """Call the model; raise `ConnectionError` if there is an error instead."""
        url = f"{session.base_url}/v1/chat/completions"
        key = {"authorization": f"Bearer {session.api_key}"}
        try:
            answer = self.http.post(url, json=request, headers=key)
        except httpx.HTTPError as error:
            raise ConnectionError(f"{url}: {error}") from error
        if answer.is_error:
            raise ConnectionError(f"{url}: {answer.status_code} {answer.text}")
        return answer.json()


class Demonstrator:
    """An `Engine` that writes the replies of the scripted agent, for the warm start."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    async def info(self) -> base.EngineInfo:
        """Model name, vocabulary size and context length."""
        return base.EngineInfo(
            model="demonstrator",
            vocab_size=len(self._tokenizer),
            max_context_tokens=512,
        )

    async def generate(self, request: base.EngineRequest) -> base.Sample:
        """Write a reply to the last message of a prompt."""
        text = str(self._tokenizer.decode(request.prompt_ids.tolist()))
        last = text.rsplit("<|im_start|>", 2)[1].removesuffix(END).split()[-1]
        reply = scripted_reply(last, random.Random(request.sampling.seed)) + END
        ids = self._tokenizer.encode(reply, add_special_tokens=False)
        return base.Sample(
            output_ids=np.array(ids, np.int32),
            output_logprobs=None,
            finish_reason="stop",
        )

    async def close(self) -> None:
        """Nothing to release."""
