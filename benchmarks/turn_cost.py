"""What a turn costs the gateway: ``python -m benchmarks.turn_cost``.

Printed is the cost against the history, on a kept-alive connection, and while another
client sends long messages.

Against history: one session in append mode, with a log in delta form, in this process.
The app is called without a server and the engine answers at once, so what is measured is
the processor time of the whole process from the received body to the sent answer, JSON
included. What grows with the history by its nature is measured by itself: joining the
body that a server received in pieces of 64 KiB, and writing the ids as JSON for an engine
over HTTP.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

import trajkit
from benchmarks.compare import commit, machine
from benchmarks.gateway import Host, Line
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines.base import EngineInfo, EngineRequest, Sample
from trajkit_shim.json_input import Json, parse_object, read_body
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.prompting.prompts import Prompts
from trajkit_shim.prompting.render import Ids, embedded_renderer
from trajkit_shim.protocols.openai import OPENAI_CHAT
from trajkit_shim.serve import spare_collections
from trajkit_shim.sessions.turn_log import TurnLog

ROOT = Path(__file__).parents[1]
SIZES = (4_000, 16_000, 69_000, 500_000)
# consecutive turns at each size, of which the median is printed
_TURNS = 9
_PIECE = 1 << 16
SECONDS = 10.0
MESSAGE_BYTES = (1_000_000, 4_000_000)


# Against history


TOOL: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class Talk:
    """A coding agent's messages: what it runs, and the sources that it gets to see."""

    def __init__(self) -> None:
        paths = sorted((ROOT / "trajkit").glob("*.py"))
        self._sources = "".join(path.read_text("utf-8") for path in paths)
        self._at = 0
        self.messages: list[Json] = [
            {"role": "system", "content": self._next(4_000)},
            {"role": "user", "content": "The tests fail: find out why."},
        ]

    def _next(self, n_characters: int) -> str:
        text = self._sources[self._at : self._at + n_characters]
        self._at = (self._at + n_characters) % (len(self._sources) - 4_000)
        return text

    def turn(self) -> tuple[Json, Json]:
        """A reply and the output of the tool that it calls."""
        call_id = f"call_{len(self.messages)}"
        call = {
            "id": call_id,
            "type": "function",
            "function": {
                "name": "bash",
                "arguments": json.dumps({"command": self._next(300)}),
            },
        }
        said = f"Step {len(self.messages)}: let me look."
        reply: Json = {"role": "assistant", "content": said, "tool_calls": [call]}
        result: Json = {
            "role": "tool",
            "content": self._next(1_500),
            "tool_call_id": call_id,
        }
        return reply, result


def body_of(messages: list[Json]) -> bytes:
    """A request as a client sends it."""
    return json.dumps({"model": "any", "messages": messages, "tools": [TOOL]}).encode()


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

    async def generate(self, request: EngineRequest) -> Sample:
        """See `Engine`."""
        self.prompt_ids = request.prompt_ids
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
        self.renderer = embedded_renderer()
        self.engine = Instant(len(self.renderer.tokenizer))
        self._app = create_app(
            self.engine,
            self.renderer,
            TurnLog(directory, form="delta", attributed=attributed),
            Options(max_body_bytes=1 << 30),
        )
        self._talk = Talk()
        self._key = ""

    async def open(self) -> None:
        """Open the session."""
        self._key = str((await self._post("/sessions", b"{}"))["api_key"])

    async def turn(self) -> Turn:
        """One more call, whose reply and its result are added to the conversation."""
        reply, result = self._talk.turn()
        [call] = reply["tool_calls"]
        function = call["function"]
        text = f"{reply['content']}\n<tool_call>\n" + json.dumps(
            {"name": function["name"], "arguments": json.loads(function["arguments"])}
        )
        self.engine.reply_ids = self.renderer.encode(
            f"{text}\n</tool_call><|im_end|>"
        ).ids
        body = body_of(self._talk.messages)
        start = time.perf_counter(), time.process_time()
        answer = await self._post("/v1/chat/completions", body)
        wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
        message = answer["choices"][0]["message"]
        sampled = {name: message[name] for name in ("role", "content", "tool_calls")}
        call_id = message["tool_calls"][0]["id"]
        self._talk.messages += [sampled, {**result, "tool_call_id": call_id}]
        return Turn(len(self.engine.prompt_ids), processor, wall, body)

    async def _post(self, path: str, body: bytes) -> Json:
        received: list[Json] = [{"type": "http.request", "body": body}]
        sent: list[Json] = []

        async def receive() -> Json:
            if received:
                return received.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Json) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST",
            "root_path": "",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"x-session-key", self._key.encode()),
            ],
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        }
        await self._app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent)
        if sent[0]["status"] != 200:
            raise RuntimeError(text.decode())
        return json.loads(text)

    def check(self, turn: Turn) -> None:
        """Raise `ValueError` unless the prompt's text is the template's."""
        messages = parse_object(turn.body)["messages"]
        text = self.renderer.text(messages, [TOOL])
        if self.renderer.decode(self.engine.prompt_ids, ended=False) != text:
            raise ValueError("the prompt's text is not the template's")


async def grow(session: Session, sizes: list[int]) -> list[tuple[Ids, list[Turn]]]:
    """The turns at each length of the history, and the ids of the last one's prompt."""
    await session.open()
    found = []
    turn = await session.turn()
    for size in sizes:
        turns: list[Turn] = []
        # the median of the turns has the size
        while len(turns) < _TURNS or turns[_TURNS // 2].n_tokens < size:
            turn = await session.turn()
            turns = [*turns[-_TURNS + 1 :], turn]
        session.check(turn)
        found.append((session.engine.prompt_ids, turns))
    return found


def processor_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The least processor time of some repetitions."""
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def render(prompts: Prompts, body: bytes, *, attributed: bool) -> None:
    """Read and render a request completely; nothing is remembered."""
    asked = OPENAI_CHAT.read(parse_object(body))
    prompts.build(
        Conversation().restore(asked.messages),
        asked.tools,
        attributed=attributed,
    )


def receive(body: bytes) -> None:
    """Join the pieces in which a server receives a body."""
    pieces = [body[i : i + _PIECE] for i in range(0, len(body), _PIECE)]

    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    asyncio.run(read_body(chunks(), 1 << 30))


def as_json(ids: Ids) -> str:
    """The ids as an engine over HTTP gets them."""
    return json.dumps(ids.tolist())


def history(sizes: list[int]) -> None:
    """Print the cost of a turn at each length of the history."""
    print(
        "\nA turn against the history, median milliseconds of processor time (wall)\n"
        f"{'':12}{'tokens':>9}{'a turn':>9}{'(wall)':>10}{'to first':>9}{'whole':>9}"
        f"{'whole/turn':>11}{'receive':>9}{'ids':>8}"
    )
    prompts = Prompts(embedded_renderer(), "render")
    for attributed in (False, True):
        first = None
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Path(folder) / "log", attributed=attributed)
            for ids, turns in asyncio.run(grow(session, sizes)):
                spent = 1e3 * statistics.median(turn.processor for turn in turns)
                wall = 1e3 * statistics.median(turn.wall for turn in turns)
                first = first or spent
                n_tokens, body = turns[_TURNS // 2].n_tokens, turns[_TURNS // 2].body
                whole, received, written = (
                    1e3 * processor_seconds(work)
                    for work in (
                        partial(render, prompts, body, attributed=attributed),
                        partial(receive, body),
                        partial(as_json, ids),
                    )
                )
                print(
                    f"{'attributed' if attributed else 'ids':12}{n_tokens:9,}"
                    f"{spent:9.2f}{f'({wall:.2f})':>10}{spent / first:9.2f}"
                    f"{whole:9.1f}{whole / spent:11.1f}{received:9.2f}{written:8.2f}"
                )


# A kept-alive connection, and a stall


def ordinary_code(n_bytes: int) -> str:
    """The source of this package, as often as it takes."""
    paths = sorted(Path(trajkit.__file__).parent.rglob("*.py"))
    text = "\n".join(path.read_text() for path in paths)
    return (text * (n_bytes // len(text) + 1))[:n_bytes]


async def short_calls(url: str, key: str) -> dict[str, np.ndarray]:
    """The seconds of each request, by what was asked."""
    taken: dict[str, list[float]] = {"healthz": [], "turn": []}
    until = time.perf_counter() + SECONDS

    async def measure(name: str, path: str, body: object) -> None:
        with closing(Line(url)) as line:
            while time.perf_counter() < until:
                start = time.perf_counter()
                await line.ask(path, body, key)
                taken[name].append(time.perf_counter() - start)

    say = {"messages": [{"role": "user", "content": "mine 0"}]}
    await asyncio.gather(
        measure("healthz", "/healthz", None),
        measure("turn", "/v1/chat/completions", say),
    )
    return {name: np.array(values) for name, values in taken.items()}


def long_calls(url: str, key: str, n_bytes: int, ready: Event) -> None:
    """Send long messages until this process is ended."""
    code = ordinary_code(n_bytes)

    async def send() -> None:
        with closing(Line(url)) as line:
            for number in range(10**6):
                # each is new to the gateway
                content = f"{number}\n{code}"
                say = {"messages": [{"role": "user", "content": content}]}
                # a message that is too long for the model is an error
                with suppress(RuntimeError):
                    await line.ask("/v1/chat/completions", say, key)
                ready.set()

    asyncio.run(send())


async def open_key(url: str) -> str:
    """The key of a new session."""
    with closing(Line(url)) as line:
        return str((await line.ask("/sessions", {}))["api_key"])


def stall() -> None:
    """Print the times of one client alone, and while another sends long messages."""
    print(
        "\nA client on kept-alive connections, milliseconds, without and with another"
    )
    with Host() as host, tempfile.TemporaryDirectory() as folder:
        _, url = host.start(Path(folder) / "run")
        mine, other = (asyncio.run(open_key(url)) for _ in range(2))
        # the first calls load what the others find
        asyncio.run(short_calls(url, mine))
        alone = asyncio.run(short_calls(url, mine))
        show("alone", alone)
        context = multiprocessing.get_context("spawn")
        for n_bytes in MESSAGE_BYTES:
            ready = context.Event()
            arguments = (url, other, n_bytes, ready)
            sender = context.Process(target=long_calls, args=arguments)
            sender.start()
            try:
                ready.wait()
                taken = asyncio.run(short_calls(url, mine))
            finally:
                sender.kill()
                sender.join()
            show(f"messages of {n_bytes:,} bytes", taken)
        ratio = np.median(taken["turn"]) / np.median(alone["turn"])
        print(
            f"bars: healthz below 50 ms: {1e3 * taken['healthz'].max():.1f} ms at most; "
            f"turns below twice their time: {ratio:.2f} times"
        )


def show(when: str, taken: dict[str, np.ndarray]) -> None:
    """Print a line per kind of request."""
    for name, seconds in taken.items():
        median, late, worst = 1e3 * np.percentile(seconds, [50, 99, 100])
        print(
            f"{name:<8} {when:<28} {len(seconds):6} calls, median {median:6.1f} ms, "
            f"99th percentile {late:6.1f} ms, longest {worst:6.1f} ms"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--no-stall", action="store_true", help="the history alone")
    options = parser.parse_args()
    print(f"{machine()}; {commit()}")
    spare_collections()  # as in a server
    history(sorted(options.sizes))
    if not options.no_stall:
        stall()


if __name__ == "__main__":
    main()
