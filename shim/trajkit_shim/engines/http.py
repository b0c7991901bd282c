"""SGLang and vLLM as engines: servers with token ids both ways, as JSON over HTTP.

Field names and behaviour are those of SGLang 0.5.23 (``POST /generate``) and vLLM 0.32
(``POST /inference/v1/generate``).
"""

import asyncio
import base64
import io
import json
import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from trajkit_shim.engines.base import EngineInfo, EngineRequest, Sample, Sampling, done
from trajkit_shim.engines.checks import accept
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json, as_json
from trajkit_shim.serve import keep_alive

# A running server accepts a connection at once. A reply takes as long as the engine is
# paused; a server that is gone is noticed by its connections (`serve.keep_alive`).
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
# The servers close an idle connection after 5 seconds (uvicorn), and a call that is sent
# at that moment is lost.
_IDLE_SECONDS = 3.0
# statuses of a server that are the client's fault, or that pass; others are 502
_SHOWN = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503}
# raised by what has missing, mistyped or too large fields
UNREADABLE: tuple[type[Exception], ...] = ArithmeticError, AttributeError, LookupError
UNREADABLE += MemoryError, RecursionError, SyntaxError, TypeError, ValueError


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(opened)
    return opened


@contextmanager
def reading(server: str, what: str) -> Iterator[None]:
    """Turn what an invalid answer raises in this context into an `EngineError`."""
    try:
        yield
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"the {server} server's {what} cannot be read: {reason}"
        raise EngineError(message) from error


class EngineClient:
    """The connections to one server; ``name`` is its name in error messages.

    They belong to the event loop of the first request. ``hints`` say what a server needs
    that answers 404 at a path. `get` and `post` raise `EngineError`: 400 if the server
    rejects the request, 5xx if it fails, cannot be reached, or does not return what is
    expected.
    """

    def __init__(
        self, name: str, base_url: str, hints: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.name, self.base_url, self._hints = name, base_url.rstrip("/"), hints
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str) -> dict[str, Any]:
        return await self.post(path, None)

    async def post(self, path: str, body: Json | None) -> dict[str, Any]:
        """Send a request and return the JSON object of its answer."""
        try:
            async with self.session().request(
                "GET" if body is None else "POST",
                self.base_url + path,
                data=None if body is None else as_json(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            message = f"the {self.name} server at {self.base_url} {reason}"
            # a server that restarts is back soon
            soon = isinstance(error, aiohttp.ClientConnectorError)
            status, seconds = (503, 5) if soon else (502, None)
            # its traceback has the body, and is in a cycle
            cause = error.with_traceback(None)
            raise EngineError(message, status, retry_after=seconds) from cause
        if answer.status >= 300:
            raise self._error(answer.status, text.decode("utf-8", "replace"), path)
        with reading(self.name, f"answer to {path}"):
            if answer.content_type == "text/event-stream":
                # a proxy that streams each reply, also where nobody asked for it
                parts = text.replace(b"\r\n", b"\n").split(b"\n\n")
                events = [part[5:] for part in parts if part[:5] == b"data:"]
                if len(events) != 2 or events[1].strip() != b"[DONE]":
                    raise ValueError(
                        f"{len(events)} events, but one reply was asked for"
                    )
                text = events[0]
            # some paths have no body
            value = orjson.loads(text or b"{}")
            if not isinstance(value, dict):
                raise ValueError(f"{value!r} is no object")
        if value.get("error"):
            # as in streams, whose status is sent before
            raise self._error(answer.status, text.decode("utf-8", "replace"), path)
        return value

    def session(self) -> aiohttp.ClientSession:
        """Return the session, which the first call opens; `EngineError` once closed."""
        if self._closed:
            raise EngineError("the connections to the engine are closed", 503)
        if self._session is None:
            # sessions bound the number of concurrent calls, so the pool does not
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_open_socket
            )
            # a cookie of one call would send all others to the same server
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=_TIMEOUT,
            )
        return self._session

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _error(self, status: int, text: str, path: str) -> EngineError:
        """The error of an answer: its message, or else the beginning of its text."""
        message = None
        with suppress(ValueError, LookupError, TypeError):
            error = json.loads(text)["error"]
            message = error["message"] if isinstance(error, dict) else error
        if not isinstance(message, str):
            message = text[:400]
        if status == 404 and path in self._hints:
            message += f" for {path}: {self._hints[path]}"
        reason = f"the {self.name} server answered {status}: {message}"
        return EngineError(reason, _SHOWN.get(status, 502))


Orders: TypeAlias = Mapping[str, Sequence[tuple[str, Json]]]
"""The requests of each order: paths and bodies."""

_NO_TEXT_CUT = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


class HttpEngine(ABC):
    """What the engines on an HTTP server have in common.

    Parameters
    ----------
    *base_urls : str
        Servers of one model, for example ``http://127.0.0.1:30000``. Each session stays on
        one of them.
    vocab_size : int
        Of the model. The servers do not report it, and an id outside it can crash them.
    check_prompts, sampling_masks : bool
        Have the server return each prompt, which must be the one that was sent, and the
        ids that could have been drawn for each output id.
    experts_per_token : int, optional
        Have it return the experts that each token was routed to, this many per layer.
    """

    server_name: ClassVar[str]
    hints: ClassVar[Mapping[str, str]] = {}
    generate_path: ClassVar[str]
    # names of sampling parameters in the server's API, where they differ
    renamed: ClassVar[Mapping[str, str]]
    # have it return exactly what was sampled: no text is trimmed, joined or removed
    as_sampled: ClassVar[Json]

    def __init__(
        self,
        *base_urls: str,
        vocab_size: int,
        check_prompts: bool = False,
        experts_per_token: int | None = None,
        sampling_masks: bool = False,
    ) -> None:
        self.sampling_masks = sampling_masks
        self._vocab_size, self._check_prompts = vocab_size, check_prompts
        self._experts_per_token = experts_per_token
        self._servers = [
            EngineClient(self.server_name, url, self.hints) for url in base_urls
        ]
        self._asked: asyncio.Task[EngineInfo] | None = None
        self._aborts = set[asyncio.Task[None]]()

    @property
    def resume_urls(self) -> list[str]:
        """Where a pause of each server ends."""
        ((path, _),) = self.orders()["resume"]
        return [server.base_url + path for server in self._servers]

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length; requested once."""
        asked = self._asked
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception())):
            asked = self._asked = asyncio.create_task(self._describe(self._servers[0]))
        # those who wait share the answer, also if the first one leaves
        return await asyncio.shield(asked)

    async def _describe(self, server: EngineClient) -> EngineInfo:
        served = await server.get("/v1/models")
        with reading(self.server_name, "id and max_model_len of /v1/models"):
            model = served["data"][0]
            return EngineInfo(
                model=str(model["id"]),
                vocab_size=self._vocab_size,
                max_context_tokens=int(model["max_model_len"]),
            )

    async def generate(self, request: EngineRequest) -> Sample:
        # its prefix cache has the session's earlier calls
        place = zlib.crc32(request.session_id.encode()) % len(self._servers)
        server = self._servers[place]
        await self.info()
        # images are megabytes to encode
        body = await done(request.images, lambda: self._body(request))
        try:
            reply = await server.post(self.generate_path, body)
        except (asyncio.CancelledError, EngineError) as error:
            # a server behind a proxy, which may have given the call up, would continue
            if getattr(error, "status", 502) == 502:
                await self._abort(server, request.request_id)
            raise
        # they are about ten million numbers for a long call
        large = self._experts_per_token or self.sampling_masks
        return await done(large, lambda: self._read(reply, request))

    def _read(self, reply: Mapping[str, Any], request: EngineRequest) -> Sample:
        experts, per_token = None, self._experts_per_token
        with reading(self.server_name, f"reply to {self.generate_path}"):
            part, fields = self._fields(reply, request)
            consumed = reply.get("prompt_token_ids")
            if consumed is None and (self._check_prompts or request.images):
                raise ValueError("no prompt_token_ids, which were asked for")
            if per_token is not None:
                n_tokens = len(request.prompt_ids) + len(fields["output_ids"])
                packed = part.get("routed_experts")
                experts = read_experts(self.server_name, packed, n_tokens, per_token)
            fields |= {"prompt_ids": consumed, "spans": part.get("weight_versions")}
            return accept(request, self.server_name, experts=experts, **fields)

    async def pause(self) -> None:
        await self._order_all("pause")

    async def update_weights(self, path: str, version: str) -> None:
        await self._order_all("update", path=path, version=version)

    async def resume(self) -> None:
        await self._order_all("resume")

    async def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
        if self._aborts:
            await asyncio.wait(self._aborts)
        for server in self._servers:
            await server.close()

    @abstractmethod
    def _body(self, request: EngineRequest) -> Json:
        """The body of a call."""

    @abstractmethod
    def _fields(
        self, reply: Mapping[str, Any], request: EngineRequest
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The part of a reply about the sample, and what `accept` takes from it."""

    @staticmethod
    @abstractmethod
    def orders(*, path: str = "", version: str = "", request_id: str = "") -> Orders:
        """What ``pause``, ``update``, ``resume`` and ``abort`` send to a server."""

    async def _abort(self, server: EngineClient, request_id: str) -> None:
        """Abort a call, also if the caller is cancelled again."""

        async def abort() -> None:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(5.0):
                    await self._order(server, "abort", request_id=request_id)

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        await asyncio.shield(task)

    async def _order(self, server: EngineClient, name: str, **values: str) -> None:
        """Send an order's requests to a server, one after the other."""
        for path, body in self.orders(**values)[name]:
            answer = await server.post(path, body)
            # SGLang's word for it; vLLM has the status
            if answer.get("success", True) is not True:
                where = f"server at {server.base_url} failed at {path[1:]}"
                what = f"{values.get('path', '')}: {answer.get('message')}"
                raise EngineError(f"the {self.server_name} {where} {what}")

    async def _order_all(self, name: str, **values: str) -> None:
        """Send an order to all servers; return once each has obeyed or failed."""
        obeyed = (self._order(server, name, **values) for server in self._servers)
        for failed in await asyncio.gather(*obeyed, return_exceptions=True):
            if failed is not None:
                raise failed

    def _params(self, sampling: Sampling) -> dict[str, Any]:
        """The parameters that are set, under the names of the server's API."""
        values: dict[str, Any] = {**sampling.values(), "extra": None}
        for name in ("stop", "stop_token_ids"):
            values[name] = list(values[name]) or None
        if sampling.structural_tag is not None:
            # both servers take its JSON as a text
            values["structural_tag"] = json.dumps(sampling.structural_tag)
        named = {
            self.renamed.get(name, name): value
            for name, value in values.items()
            if value is not None
        }
        return {**sampling.extra, **named, **self.as_sampled}


def read_experts(
    server: str, packed: object, n_tokens: int, per_token: int
) -> npt.NDArray[np.int16]:
    """Decode ``routed_experts``: base64 of little-endian int32 (SGLang) or ``.npy`` (vLLM).

    The result has shape (n_tokens - 1, n_layers, per_token), for ``n_tokens`` of prompt
    and output. Raises `EngineError` or `ValueError`.
    """
    where = f"the {server} server gave"
    if not isinstance(packed, str):
        needs = "a mixture-of-experts model and --enable-return-routed-experts"
        raise EngineError(f"{where} no routed_experts: it needs {needs}")
    data, rows = base64.b64decode(packed, validate=True), n_tokens - 1
    if server == VLLMEngine.server_name:
        # `np.load` would also take an archive
        experts = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    else:
        experts = np.frombuffer(data, "<i4")
        if rows * per_token and not len(experts) % (rows * per_token):
            experts = experts.reshape(rows, -1, per_token)
    maximum, shape = np.iinfo(np.int16).max, experts.shape
    if experts.ndim != 3 or not experts.size or shape[::2] != (rows, per_token):
        fault = f"of shape {shape} for {rows} tokens with {per_token} a layer"
        raise EngineError(f"{where} routed experts {fault}")
    if experts.dtype.kind not in "iu" or experts.min() < 0 or experts.max() > maximum:
        values = f"{experts.dtype} in [{experts.min()}, {experts.max()}]"
        rule = f"expected integers in [0, {maximum}]"
        raise EngineError(f"{where} routed experts that are {values}: {rule}")
    return np.asarray(experts, np.int16)


class SGLangEngine(HttpEngine):
    """SGLang servers of one model; for the parameters see `HttpEngine`.

    Logprobs are those of the distribution that was sampled from. If the sampling
    parameters cut off its tail, the server is asked for the logprobs after the cut. A
    call without a cut has no sampling mask: each id could have been drawn. In a pause,
    running calls lose their cache.
    """

    server_name = "SGLang"
    generate_path = "/generate"
    takes_images = True
    renamed: ClassVar[Mapping[str, str]] = {"seed": "sampling_seed"}
    as_sampled: ClassVar[Json] = {**_NO_TEXT_CUT, "no_stop_trim": True}
    # the server's own sampling parameters, where a call has none
    _preferred: Mapping[str, object] = MappingProxyType({})

    @staticmethod
    def orders(*, path: str = "", version: str = "", request_id: str = "") -> Orders:
        load: Json = {"model_path": path, "weight_version": version}
        return {
            "pause": [("/pause_generation", {"mode": "retract"})],
            "update": [("/update_weights_from_disk", {**load, "flush_cache": True})],
            "resume": [("/continue_generation", {})],
            "abort": [("/abort_request", {"rid": request_id})],
        }

    async def _describe(self, server: EngineClient) -> EngineInfo:
        model = await server.get("/model_info")
        self._preferred = model.get("preferred_sampling_params") or {}
        return await super()._describe(server)

    def _body(self, request: EngineRequest) -> Json:
        params, images = self._params(request.sampling), request.images
        # the server expands one id per image
        keep = np.ones(len(request.prompt_ids), np.bool_)
        for image in images:
            keep[image.start + 1 : image.stop] = False
        wanted = {
            "return_logprob": True,
            "return_sampling_mask": self._cuts(params),
            # it may have tokenized a prompt with images again
            "return_prompt_token_ids": self._check_prompts or len(images) > 0,
            "return_routed_experts": self._experts_per_token is not None,
        }
        body: Json = {
            "rid": request.request_id,
            "input_ids": request.prompt_ids[keep],
            "sampling_params": params,
            **{name: True for name, want in wanted.items() if want},
        }
        if images:
            body["image_data"] = [
                f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
                for image in images
            ]
        return body

    def _fields(
        self, reply: Mapping[str, Any], request: EngineRequest
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        meta, mask = reply["meta_info"], None
        scored = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
        if self._cuts(self._params(request.sampling)):
            cut = meta["output_token_sampling_logprobs"]
            if len(cut) != len(scored):
                missing = f"{len(cut)} of {len(scored)} logprobs after the cut"
                raise ValueError(missing)
            scored = [(new, token) for new, (_, token) in zip(cut, scored, strict=True)]
            if self.sampling_masks:
                # null would say that each id could have been drawn
                mask = [*meta["output_token_sampling_mask"]]
        finish = meta["finish_reason"] or {"type": None}
        # its word for an id outside the vocabulary, which it replaces by a stop token
        word = "matched" if finish.get("matched") == "NaN happened" else "type"
        return meta, {
            "request_id": meta.get("id"),
            "output_ids": reply["output_ids"],
            "scored": scored,
            "finish_reason": finish[word],
            "counts": meta,
            "mask": mask,
        }

    def _cuts(self, params: Json) -> bool:
        """Whether some ids cannot be sampled that the plain logprobs include."""
        unused = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1}
        temperature, top_p, min_p, top_k = (
            params.get(name, self._preferred.get(name, value))
            for name, value in unused.items()
        )
        # SGLang's own "no limit" is 2**30
        limits = isinstance(top_k, int) and 0 < top_k < 2**30
        return temperature == 0 or top_p != 1.0 or min_p != 0.0 or limits


# vLLM's own ids of calls are this and the request's
_PREFIX = "generate-tokens-"
_DEVELOPING = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"


class VLLMEngine(HttpEngine):
    """vLLM servers of one model; for the parameters see `HttpEngine`.

    Start the server with ``--enable-scale-out``, which adds the endpoint, and with
    ``--logprobs-mode processed_logprobs``: without it, logprobs are from before
    temperature, ``top_p`` and so on, and `check` refuses the server. A greedy call is
    sent with ``top_k`` 1, for which vLLM returns those of the distribution that was
    sampled from. Pauses and weight updates need a server with ``VLLM_SERVER_DEV_MODE=1``;
    in a pause, running calls keep their cache.
    """

    server_name = "vLLM"
    generate_path = "/inference/v1/generate"
    hints: ClassVar[Mapping[str, str]] = {
        generate_path: "start it with --enable-scale-out",
        **dict.fromkeys(("/pause?mode=keep", "/collective_rpc"), _DEVELOPING),
    }
    renamed: ClassVar[Mapping[str, str]] = {"max_new_tokens": "max_tokens"}
    as_sampled: ClassVar[Json] = {"n": 1, "logprobs": 0, **_NO_TEXT_CUT}
    as_sampled |= {"include_stop_str_in_output": True}

    async def check(self, request: EngineRequest) -> None:
        """Where one id is allowed, its logprob is 0."""
        only = {"allowed_token_ids": [0], "ignore_eos": True}
        sampling = Sampling(max_new_tokens=8, temperature=1.0, top_k=1, extra=only)
        sample = await self.generate(replace(request, sampling=sampling))
        if sample.output_logprobs is not None and sample.output_logprobs.any():
            raise EngineError(
                "the vLLM server returns the logprobs from before temperature, top_p and "
                "so on: start it with --logprobs-mode processed_logprobs"
            )

    @staticmethod
    def orders(*, path: str = "", version: str = "", request_id: str = "") -> Orders:
        load: Json = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        abort: Json = {"request_ids": [_PREFIX + request_id]}
        return {
            "pause": [("/pause?mode=keep", {})],
            "update": [
                ("/collective_rpc", load),
                ("/reset_prefix_cache", {}),
                ("/update_weight_version", {"new_version": version}),
            ],
            "resume": [("/resume", {})],
            "abort": [("/inference/v1/abort_requests", abort)],
        }

    def _body(self, request: EngineRequest) -> Json:
        # explicit, so that none of these comes from the model's generation config
        params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        params |= {"min_p": 0.0, **self._params(request.sampling)}
        if tag := params.pop("structural_tag", None):
            params["structured_outputs"] = {"structural_tag": tag}
        if params["temperature"] == 0:
            params |= {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
        if self.sampling_masks and params["top_k"] <= 0:
            rule = "set top_k in the sampling of the session"
            message = f"vLLM returns sampling masks only for calls with top_k: {rule}"
            raise EngineError(message, 400)
        body: Json = {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids,
            "sampling_params": params,
            # a grammar holds from the first token, whatever parser the server has
            "reasoning_ended": True,
        }
        if self._check_prompts:
            body["return_token_ids"] = True
        return body

    def _fields(
        self, reply: Mapping[str, Any], request: EngineRequest
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        choices, usage = reply["choices"], reply["usage"]
        if [choice["index"] for choice in choices] != [0]:
            asked = "but the one with index 0 was asked for"
            raise ValueError(f"{len(choices)} choices, {asked}")
        (choice,), mask = choices, None
        if self.sampling_masks and (mask := choice.get("sampling_mask")) is None:
            raise ValueError("gave no sampling mask: it needs --return-sampling-mask")
        details = usage.get("prompt_tokens_details") or {}
        request_id, scored = reply.get("request_id"), choice["logprobs"]["content"]
        if request_id == _PREFIX + request.request_id:
            request_id = request.request_id
        return choice, {
            "request_id": request_id,
            "output_ids": choice["token_ids"],
            "scored": [(entry["logprob"], _token_of(entry)) for entry in scored],
            "finish_reason": choice["finish_reason"],
            "counts": {**usage, "cached_tokens": details.get("cached_tokens")},
            "mask": mask,
        }


def _token_of(entry: Mapping[str, Any]) -> object:
    """The id that a logprob is of; some servers write it as ``token_id:17``."""
    if "token_id" in entry:
        return entry["token_id"]
    number = entry["token"].removeprefix("token_id:")
    return int(number) if number.isdecimal() else number
