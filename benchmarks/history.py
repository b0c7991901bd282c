"""What a turn costs the gateway as the history of its conversation grows.

One session, in append mode, with a log in delta form, in this process. The app is called
without a server: receiving the body and sending the answer are not measured, nor is the
engine, which answers at once.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.prompts import TOOL, Talk, body_of
from trajkit_shim.app import create_app
from trajkit_shim.engines.base import EngineInfo, Sample, Sampling
from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.sessions.turn_log import TurnLog

SIZES = (4_000, 16_000, 69_000, 500_000)
# consecutive turns that are measured at each size
_TURNS = 7


class Instant:
    """An engine that gives the reply that it was given, at once."""

    def __init__(self, vocab_size: int) -> None:
        self._info = EngineInfo(
            model="instant", vocab_size=vocab_size, max_context_tokens=1 << 30
        )
        self.reply_ids: Ids = np.empty(0, np.int32)
        self.prompt_ids: Ids = np.empty(0, np.int32)

    async def info(self) -> EngineInfo:
        """See `Engine`."""
        return self._info

    async def generate(
        self, prompt_ids: Ids, sampling: Sampling, *, request_id: str, session_id: str
    ) -> Sample:
        """See `Engine`."""
        self.prompt_ids = prompt_ids
        return Sample(
            output_ids=self.reply_ids,
            output_logprobs=np.full(len(self.reply_ids), -0.5, np.float32),
            finish_reason="stop",
        )

    async def close(self) -> None:
        """See `Engine`."""


@dataclass
class Turn:
    """One turn."""

    n_tokens: int  # of its prompt
    processor: float  # seconds of all threads
    wall: float
    body: bytes


class Session:
    """A session of a gateway in this process, and its client."""

    def __init__(self, directory: Path, *, attributed: bool) -> None:
        self.renderer = ChatRenderer(load_tokenizer())
        self.engine = Instant(self.renderer.n_tokens)
        self.app = create_app(
            self.engine,
            self.renderer,
            TurnLog(directory, form="delta", attributed=attributed),
            attributed=attributed,
            max_body_bytes=1 << 30,
        )
        self.talk = Talk()
        self._key = ""

    async def open(self) -> None:
        """Open the session."""
        self._key = (await self.post("/sessions", b"{}"))["api_key"]

    async def turn(self) -> Turn:
        """One more call, whose reply and its result are added to the conversation."""
        reply, result = self.talk.turn()
        [call] = reply["tool_calls"]
        function = call["function"]
        text = f"{reply['content']}\n<tool_call>\n" + json.dumps(
            {"name": function["name"], "arguments": json.loads(function["arguments"])}
        )
        self.engine.reply_ids = self.renderer.ids_of(f"{text}\n</tool_call><|im_end|>")
        body = body_of(self.talk.messages)
        start = time.perf_counter(), time.process_time()
        answer = await self.post("/v1/chat/completions", body)
        wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
        message = answer["choices"][0]["message"]
        sampled = {name: message[name] for name in ("role", "content", "tool_calls")}
        call_id = message["tool_calls"][0]["id"]
        self.talk.messages += [sampled, {**result, "tool_call_id": call_id}]
        return Turn(len(self.engine.prompt_ids), processor, wall, body)

    async def post(self, path: str, body: bytes) -> Json:
        """The answer to a POST; raises `RuntimeError` unless its status is 200."""
        received = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Json] = []

        async def receive() -> Json:
            if received:
                return received.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Json) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"x-session-key", self._key.encode())]
        await self.app(
            {
                "type": "http",
                "method": "POST",
                "path": path,
                "raw_path": path.encode(),
                "query_string": b"",
                "headers": headers,
                "scheme": "http",
                "server": ("localhost", 80),
                "client": ("127.0.0.1", 1),
                "root_path": "",
                "http_version": "1.1",
            },
            receive,
            send,
        )
        text = b"".join(message.get("body", b"") for message in sent)
        if sent[0]["status"] != 200:
            raise RuntimeError(text.decode())
        return json.loads(text)

    def check(self, turn: Turn) -> None:
        """Raise `ValueError` unless the prompt's text is the template's."""
        messages = json.loads(turn.body)["messages"]
        text = self.renderer.text(messages, [TOOL])
        if self.renderer.decode(self.engine.prompt_ids, ended=False) != text:
            raise ValueError("the prompt's text is not the template's")


async def grow(
    session: Session, sizes: Sequence[int]
) -> Iterator[tuple[int, list[Turn]]]:
    """The turns that follow upon each length of the history."""
    await session.open()
    found = []
    turn = await session.turn()
    for size in sizes:
        while turn.n_tokens < size:
            turn = await session.turn()
        session.check(turn)
        turns = [await session.turn() for _ in range(_TURNS)]
        turn = turns[-1]
        session.check(turn)
        found.append((turns[0].n_tokens, turns))
    return found


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]] or SIZES
    for attributed in (False, True):
        print("attributed" if attributed else "ids alone")
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Path(folder) / "log", attributed=attributed)
            for n_tokens, turns in asyncio.run(grow(session, sizes)):
                cpu = [1e3 * turn.processor for turn in turns]
                wall = [1e3 * turn.wall for turn in turns]
                print(
                    f"{n_tokens:8,} tokens: processor {min(cpu):7.2f} least, "
                    f"{statistics.median(cpu):7.2f} median; wall {min(wall):7.2f}, "
                    f"{statistics.median(wall):7.2f} ms; body {len(turns[0].body):,}"
                )


if __name__ == "__main__":
    main()
