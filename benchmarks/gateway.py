"""Gateways on the embedded engine, in processes of their own, and what their logs owe.

``python -m benchmarks.gateway`` imports what a gateway needs once, and forks one for
each line of JSON that it reads. `Host` speaks with it.

Every session talks of itself: its messages and the replies to them bear its name and a
number, so that a turn that is lost, doubled or under the wrong session can be told.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute
from aiohttp import web

import trajkit as tk
from trajkit.errors import TornLogWarning
from trajkit_shim.engines import base
from trajkit_shim.engines.embedded import (
    END,
    EmbeddedEngine,
    Reply,
    chat_files,
    messages,
)
from trajkit_shim.engines.http import SGLangEngine
from trajkit_shim.prompting.render import ChatRenderer, embedded_renderer
from trajkit_shim.serve import listen, serve, url_of

ROOT = Path(__file__).parents[1]
Json: TypeAlias = dict[str, Any]


def repeat(prompt: str) -> list[Reply]:
    """The policy: it says after the user how the user's last message begins."""
    said = [message.text for message in messages(prompt) if message.role == "user"]
    return [Reply((reply_to(said[-1]),))]


def reply_to(text: str) -> str:
    """The reply to a message: its session and number."""
    return f"You said {' '.join(text.split()[:2])}."


class SlowEngine(EmbeddedEngine):
    """It takes its time, but hardly any of the processor's.

    ``seconds``: each reply takes between half and one and a half times as long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seed=0)
        self._seconds = seconds
        self._tokenizer = chat_files()[0]

    async def generate(self, request: base.EngineRequest) -> base.Sample:
        """Reply as `repeat` does."""
        prompt_ids = request.prompt_ids
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        added = self.vocabulary.added
        start = np.flatnonzero(prompt_ids == added["<|im_start|>"])[-2]
        said = self.vocabulary.decode(prompt_ids[start : start + 80].tolist())
        text = reply_to(said.partition("user\n")[2].partition("<|im_end|>")[0])
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return base.Sample(
            output_ids=np.array([*ids, added[END]], np.int32),
            output_logprobs=np.full(len(ids) + 1, -0.1, np.float32),
            finish_reason="stop",
            weight_versions=(base.WeightSpan("scripted", 0, len(ids) + 1),),
        )


def serve_engine(seconds: float, listening: Callable[[str], None]) -> None:
    """Serve a `SlowEngine` as an SGLang server serves a model, until SIGTERM."""
    engine = SlowEngine(seconds)

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        sample = await engine.generate(
            base.EngineRequest(
                prompt_ids=np.array(asked["input_ids"], np.int32),
                sampling=base.Sampling(max_new_tokens=1 << 10),
                request_id=asked["rid"],
                session_id="",
            )
        )
        assert sample.output_logprobs is not None
        ids, logprobs = sample.output_ids.tolist(), sample.output_logprobs.tolist()
        meta = {
            "id": asked["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(logprobs, ids, strict=True)
            ],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    async def models(_: web.Request) -> web.Response:
        info = await engine.info()
        model = {"id": info.model, "max_model_len": info.max_context_tokens}
        return web.json_response({"data": [model]})

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/model_info", model_info)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening(f"http://127.0.0.1:{listener.getsockname()[1]}")
    web.run_app(app, sock=listener, print=None, access_log=None)


# The host


def host() -> None:
    """Fork a gateway or an engine's server for each line of the standard input."""
    # read before the fork, so that a gateway is there at once
    renderer = embedded_renderer()
    children: set[int] = set()
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if "wait" in asked:
                os.waitpid(asked["wait"], 0)
                children.discard(asked["wait"])
                answer = {}
            else:
                answer = _fork(asked, renderer)
                children.add(answer["pid"])
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(asked: Json, renderer: ChatRenderer) -> Json:
    from trajkit_shim.app import create_app
    from trajkit_shim.sessions.turn_log import TurnLog

    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read) as pipe:
            return {"pid": child, "url": pipe.readline()}
    os.close(read)
    status = 1

    def listening(url: str) -> None:
        os.write(write, url.encode())
        os.close(write)

    try:
        if "serves" in asked:
            serve_engine(asked["serves"], listening)
        else:
            engine: base.Engine = EmbeddedEngine(repeat, seed=0)
            if asked.get("engine_url"):
                n_ids = len(renderer.tokenizer)
                engine = SGLangEngine(asked["engine_url"], vocab_size=n_ids)
            log = TurnLog(asked["directory"], **asked.get("log", {}))
            app = create_app(engine, renderer, log)
            listener = listen("127.0.0.1", 0)
            listening(url_of(listener))
            serve(app, listener)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # the rest of the program is the host's
        os._exit(status)


class Host:
    """A host of gateways; a context manager, whose end is the end of all of them."""

    def __enter__(self) -> "Host":
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gateway"],
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}",
                "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(
        self, directory: Path, engine_url: str | None = None, **log: object
    ) -> tuple[int, str]:
        """The process id and the URL of a new gateway.

        ``engine_url``: of its engine's server; default: the embedded engine. The rest is
        `TurnLog`'s.
        """
        asked = {"directory": str(directory), "engine_url": engine_url, "log": log}
        answer = self._ask(asked)
        return answer["pid"], answer["url"]

    def engine(self, seconds: float) -> str:
        """The URL of a new server of a `SlowEngine`."""
        return str(self._ask({"serves": seconds})["url"])

    def wait(self, pid: int) -> None:
        """Return once a gateway that was told to end is gone."""
        self._ask({"wait": pid})

    def _ask(self, asked: Json) -> Json:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer.get("url") == "":
            raise RuntimeError("the gateway did not start")
        return answer


# Its clients


@dataclass
class Told:
    """What a gateway acknowledged."""

    # each session's API key
    keys: dict[str, str] = field(default_factory=dict)
    # of each session, the number that was said and the reply to it, in order
    replies: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    # of each session that was finished, its reward
    finished: dict[str, float] = field(default_factory=dict)
    # calls that got no answer, where the session's name and number stand for each
    unanswered: set[tuple[str, int]] = field(default_factory=set)
    most_at_once: int = 0

    @property
    def n_replies(self) -> int:
        """Turns that were acknowledged."""
        return sum(map(len, self.replies.values()))


_SOURCE = Path(asyncio.__file__).with_name("base_events.py").read_text()


def said(session: str, number: int, length: int = 0) -> str:
    """The name of a session, then a number of characters of source code."""
    start = hash((session, number)) % (len(_SOURCE) - length)
    return f"{session} {number} {_SOURCE[start : start + length]}".strip()


class Line:
    """One connection to a gateway: as little of HTTP as it takes.

    A library's pool of some hundred connections would cost more than what is measured.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: object = None, key: str = "") -> Json:
        """The answer to a POST of a body, or to a GET without one.

        Raises
        ------
        OSError, EOFError
            The connection broke.
        RuntimeError
            The answer is an error.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        data = b"" if body is None else json.dumps(body).encode()
        verb = "GET" if body is None else "POST"
        writer.write(
            f"{verb} {path} HTTP/1.1\r\nHost: gateway\r\nX-Session-Key: {key}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        text = await reader.readexactly(length)
        if " 200 " not in head.partition("\r\n")[0]:
            raise RuntimeError(f"{path}: {head.partition(chr(13))[0]}: {text!r}")
        answer: Json = json.loads(text)
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


async def open_session(url: str, session: str, told: Told) -> None:
    """Open a session under its own name."""
    with closing(Line(url)) as line:
        opened = await line.ask("/sessions", {"session_id": session})
    told.keys[session] = opened["api_key"]
    told.replies[session] = []


async def converse(
    url: str,
    session: str,
    turns: int,
    told: Told,
    *,
    first: int = 0,
    length: int = 0,
) -> None:
    """One call after the other, the whole conversation in each.

    ``first``, a multiple of 1000, numbers the conversation's calls. ``length``: of each
    message, in characters.
    """
    conversation: list[object] = []
    with closing(Line(url)) as line:
        for number in range(first, first + turns):
            text = said(session, number, length)
            conversation.append({"role": "user", "content": text})
            told.unanswered.add((session, number))
            told.most_at_once = max(told.most_at_once, len(told.unanswered))
            answer = await line.ask(
                "/v1/chat/completions", {"messages": conversation}, told.keys[session]
            )
            message = answer["choices"][0]["message"]
            conversation.append(message)
            told.unanswered.discard((session, number))
            told.replies[session].append((number, message["content"]))


async def finish_session(url: str, session: str, reward: float, told: Told) -> None:
    """End a session with a reward."""
    with closing(Line(url)) as line:
        await line.ask(f"/sessions/{session}/finish", {"reward": reward})
    told.finished[session] = reward


# What its log owes


@dataclass
class Found:
    """What is in a log, and what is wrong with it."""

    turns: int = 0
    # files that end within an entry
    torn: int = 0
    wrong: list[str] = field(default_factory=list)


def check_log(directory: Path, told: Told) -> Found:
    """Compare a log with what was acknowledged.

    Every reply that a client got is in the log once, under its session, with the
    conversation that it answers; no turn is there twice, holds a word of another
    session, or leaves a gap. A turn that no client got may be there: it was written,
    and the gateway ended before the client heard of it.
    """
    found = Found()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TornLogWarning)
        turns = tk.expand(tk.read_turns(directory))
        # a gateway may be killed before anything was opened
        opened = tk.read_sessions(directory).to_pylist() if told.replies else []
    found.torn = sum(issubclass(each.category, TornLogWarning) for each in caught)
    tk.validate(turns)
    found.turns = len(turns)
    context = turns.filter(pa.compute.equal(turns["trainable"], False))
    for turn in context.to_pylist():
        # no client left its answer behind; those that a kill cut off nobody amends
        found.wrong.append(
            f"{turn['session_id']}: turn {turn['turn_index']} is amended"
        )
    _check_turns(turns, told, found)
    lines = {line["session_id"]: line for line in opened}
    for session in told.replies:
        if session not in lines:
            found.wrong.append(f"{session}: opened, and no line of it")
    for session, reward in told.finished.items():
        line = lines.get(session, {})
        if (line.get("reward"), line.get("ended_by")) != (reward, "finish"):
            found.wrong.append(
                f"{session}: finished with {reward}, and its line {line}"
            )
    return found


def _check_turns(turns: pa.Table, told: Told, found: Found) -> None:
    wrong = found.wrong
    logged: dict[str, dict[int, str]] = {}
    indices: dict[str, list[int]] = {}
    bodies: dict[tuple[str, bytes], str] = {}
    for turn in turns.to_pylist():
        session = turn["session_id"]
        where = f"{session}, turn {turn['turn_index']}"
        indices.setdefault(session, []).append(turn["turn_index"])
        for message in [*turn["messages"], turn["response"]]:
            if message["body"] is not None:
                bodies[session, message["key"]] = message["body"]
        texts = [
            json.loads(bodies[session, message["key"]])["content"]
            for message in [*turn["messages"], turn["response"]]
        ]
        for text in texts:
            if not text.removeprefix("You said ").startswith(f"{session} "):
                wrong.append(f"{where}: {text!r} is another session's")
        asked, reply = texts[-2:]
        if reply != reply_to(asked):
            wrong.append(f"{where}: {reply!r} answers another call")
        number = int(asked.split()[1])
        if number in logged.setdefault(session, {}):
            wrong.append(f"{where}: number {number} is there twice")
        logged[session][number] = reply
        if len(texts) != 2 * (number % 1000) + 2:
            wrong.append(f"{where}: {len(texts)} messages for number {number}")
        if len(turn["output_ids"]) != len(turn["output_logprobs"]):
            wrong.append(f"{where}: ids and logprobs differ in number")
    for session, replies in told.replies.items():
        for number, reply in replies:
            if logged.get(session, {}).get(number) != reply:
                wrong.append(f"{session}: reply {reply!r} is not in the log")
    for session, each in indices.items():
        if each != list(range(len(each))):
            wrong.append(f"{session}: turns {each}")
    answered: Mapping[str, int] = Counter(
        {session: len(replies) for session, replies in told.replies.items()}
    )
    for session, each in logged.items():
        surplus = len(each) - answered.get(session, 0)
        pending = sum(name == session for name, _ in told.unanswered)
        if surplus > pending:
            wrong.append(f"{session}: {surplus} turns that nobody asked for")


if __name__ == "__main__":
    host()
