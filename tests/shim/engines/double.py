"""The one double of an engine's server: it replays what real servers answered.

Recorded from SGLang 0.5.23 and vLLM 0.32.0 (`sglang_replies.json`, `vllm_replies.json`).
"""

import asyncio
import json
from collections import Counter, deque
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.shim.fakes import engine_request
from trajkit_shim.engines.checks import check_sample
from trajkit_shim.engines.http import SGLangEngine, VLLMEngine

ENGINES = {"sglang": SGLangEngine, "vllm": VLLMEngine}
RECORDED = {
    name: json.loads((Path(__file__).parents[1] / f"{name}_replies.json").read_text())[
        "replies"
    ]
    for name in ENGINES
}
PROMPT = np.array(RECORDED["vllm"]["basic"]["request"]["token_ids"], np.int32)
PREFIX = "generate-tokens-"
# of both recorded models
VOCABULARY = 4032


def recorded(kind, name="basic"):
    """A copy of a recorded reply."""
    return deepcopy(RECORDED[kind][name]["reply"])


def with_id(kind, reply, request_id):
    """A reply under the id of a request, as each server writes it."""
    if kind == "sglang":
        reply["meta_info"]["id"] = request_id
    else:
        reply["request_id"] = PREFIX + request_id
    return reply


def answered(kind, name="basic"):
    """A recorded reply as the answer to the request r1."""
    return with_id(kind, recorded(kind, name), "r1")


class Double:
    """A server that answers calls with the replies given, in order.

    A reply is the name of a recorded one, an object, or a `web.Response`. Other paths get
    what ``paths`` has for them, or 404. ``calls``: bodies and headers of the calls;
    ``asked``: path and body of all other requests. Recorded replies have the id of their
    request.
    """

    def __init__(self, kind, *replies, **paths):
        self.kind, self.replies, self.calls, self.asked = kind, deque(replies), [], []
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.left = asyncio.Event()
        self.paths = {"v1/models": recorded(kind, "models"), **paths}
        if kind == "sglang":
            self.paths.setdefault("model_info", recorded(kind, "model_info"))

    async def answer(self, request):
        text = await request.read()
        body = json.loads(text) if text else None
        if request.path == ENGINES[self.kind].generate_path:
            self.calls.append((body, request.headers))
            self.entered.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.left.set()
                raise
            return self._reply(self.replies.popleft(), body)
        self.asked.append((request.path_qs, body))
        found = self.paths.get(request.path.removeprefix("/"))
        if callable(found):
            found = await found(body)
        if found is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return found if isinstance(found, web.Response) else web.json_response(found)

    def _reply(self, reply, body):
        if isinstance(reply, web.Response):
            return reply
        if not isinstance(reply, str):
            return web.json_response(reply)
        status = RECORDED[self.kind][reply]["status"]
        reply = recorded(self.kind, reply)
        if status == 200:
            sent = body["rid"] if self.kind == "sglang" else body["request_id"]
            reply = with_id(self.kind, reply, sent)
        return web.json_response(reply, status=status)

    def counted(self):
        """How often each path was asked for."""
        return Counter(path for path, _ in self.asked)

    @asynccontextmanager
    async def listening(self):
        """Yield its URL."""
        app = web.Application(handler_args={"handler_cancellation": True})
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    @asynccontextmanager
    async def engine(self, **options):
        """Yield an engine that uses it."""
        async with self.listening() as url:
            options = {"vocab_size": VOCABULARY, **options}
            engine = ENGINES[self.kind](url, **options)
            try:
                yield engine
            finally:
                await engine.close()


async def sample(engine, prompt=PROMPT, **changes):
    """One call of an engine, checked as the gateway does."""
    request = engine_request(prompt, **{"max_new_tokens": 40, **changes})
    found = await engine.generate(request)
    check_sample(found, request.prompt_ids, request.sampling, await engine.info())
    return found
