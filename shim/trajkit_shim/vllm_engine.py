"""vLLM's token-level HTTP API as an engine: ``POST /inference/v1/generate``.

The server is started with ``--enable-scale-out`` or ``--tokens-only``, which add the
endpoint, and with ``--logprobs-mode processed_logprobs``: the logprobs that it gives
without that are of the model's distribution before temperature, ``top_p`` and the like,
which is not what was sampled from. Which of the two it gives is found out by sampling.
Field names and behaviour as of vLLM 0.33.
"""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, cast

import httpx
import numpy as np
import numpy.typing as npt

from trajkit_shim.engine import (
    EngineError,
    EngineInfo,
    OnTokens,
    Sample,
    Sampling,
    WeightSpan,
)
from trajkit_shim.engine_http import UNREADABLE, EngineServer
from trajkit_shim.limits import check_prompt
from trajkit_shim.wire import Json

_GENERATE = "/inference/v1/generate"
# sampling what the ids say and nothing else, with the logprob of what was sampled
_AS_SAMPLED: Json = {
    "n": 1,
    "logprobs": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
}
# what vLLM writes for a logprob of minus infinity, and for a missing one
_NONE = -9999.0
# the endpoint takes none of these from the model's generation config
_UNSHAPED: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
# of SamplingParams: what else changes the distribution that is sampled from
_SHAPING = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "min_tokens": 0,
}


class VLLMEngine:
    """One vLLM server or router, reached over HTTP.

    Parameters
    ----------
    base_url : str
        ``http://127.0.0.1:8000``.
    vocab_size : int
        Of the model: `trajkit_shim.sglang_engine.model_vocab_size`. The server does
        not tell.
    max_context_tokens : int, optional
        None: what the server says.
    client : httpx.AsyncClient, optional
        Used in place of one made here; closed with the engine.
    """

    def __init__(
        self,
        base_url: str,
        *,
        vocab_size: int,
        max_context_tokens: int | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._server = EngineServer("vLLM", base_url, client)
        self._info: EngineInfo | None = None
        self._processed: bool | None = None

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length; asked of the server once."""
        if self._info is None:
            served = await self._server.get("/v1/models")
            try:
                model = cast(Any, served)["data"][0]
                context = self._max_context_tokens or int(model["max_model_len"])
                name = str(model["id"])
            except (LookupError, TypeError, ValueError) as error:
                raise EngineError(
                    f"/v1/models of the vLLM server tells no max_model_len: {served!r}"
                ) from error
            self._info = EngineInfo(
                model=name, vocab_size=self._vocab_size, max_context_tokens=context
            )
        return self._info

    async def generate(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
    ) -> Sample:
        """One sample. Cancelling the awaiting task aborts the call at the server.

        Logprobs are those of the distribution that was sampled from. A greedy call is
        made as one with ``top_k`` 1, of which vLLM tells them.

        Raises
        ------
        EngineError
            400: the prompt cannot be sampled from, or the server says so; or the call
            shapes the distribution, and the server does not give the logprobs of what
            it shaped. 5xx: the server failed, cannot be reached, or its answer makes no
            sense.
        """
        return await self._sample(prompt_ids, sampling, request_id, session_id, None)

    async def stream(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        on_tokens: OnTokens,
    ) -> Sample:
        """As `generate`, and tells the output ids as they come."""
        return await self._sample(
            prompt_ids, sampling, request_id, session_id, on_tokens
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

    async def _sample(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        request_id: str,
        session_id: str,
        on_tokens: OnTokens | None,
    ) -> Sample:
        info = await self.info()
        check_prompt(prompt_ids, info)
        params = _sampling_params(sampling)
        shapes = _shapes(params)
        if shapes and not await self._gives_processed(prompt_ids, session_id):
            raise EngineError(
                f"{', '.join(shapes)} of the call change what is sampled from, and the "
                "vLLM server gives the logprobs from before: it needs "
                "--logprobs-mode processed_logprobs",
                400,
            )
        return read_sample(
            await self._call(prompt_ids, params, request_id, session_id, on_tokens)
        )

    async def _gives_processed(
        self, prompt_ids: npt.NDArray[np.int32], session_id: str
    ) -> bool:
        """Whether the logprobs are those of what is left after ``top_k`` and the like.

        Where only one token can be sampled, the next best has none. The server is asked
        once.
        """
        if self._processed is None:
            only = {**_AS_SAMPLED, **_UNSHAPED, "top_k": 1, "max_tokens": 1}
            reply = await self._call(
                prompt_ids, {**only, "logprobs": 2}, uuid.uuid4().hex, session_id, None
            )
            self._processed = _only_one(reply)
        return self._processed

    async def _call(
        self,
        prompt_ids: npt.NDArray[np.int32],
        params: Json,
        request_id: str,
        session_id: str,
        on_tokens: OnTokens | None,
    ) -> Json:
        request: Json = {
            "request_id": request_id,
            "token_ids": prompt_ids.tolist(),
            "sampling_params": params,
        }
        # routers: a session stays on one prefix cache, a request keeps its id
        headers = {"X-Session-ID": session_id, "X-Request-Id": request_id}
        try:
            if on_tokens is None:
                return await self._server.post(_GENERATE, request, headers)
            request["stream"] = True
            request["stream_options"] = {"include_usage": True}
            gathered = Gathered()
            async for event in self._server.events(_GENERATE, request, headers):
                on_tokens(gathered.take(event))
            return gathered.reply
        except (asyncio.CancelledError, EngineError):
            # a closed connection ends the call too, where nothing stands in between
            await asyncio.shield(
                self._server.tell(
                    "/abort_requests",
                    {"request_ids": [f"generate-tokens-{request_id}"]},
                )
            )
            raise


def _only_one(reply: Mapping[str, Any]) -> bool:
    """Whether the reply's token is the only one with a logprob among the best two."""
    sample = read_sample(reply)
    try:
        (token,) = sample.output_ids.tolist()
        (scored,) = reply["choices"][0]["logprobs"]["content"]
        others = [
            float(best["logprob"])
            for best in scored["top_logprobs"]
            if best["token"] != f"token_id:{token}"
        ]
    except UNREADABLE as error:
        raise EngineError(
            f"the vLLM server's two best tokens of {_GENERATE} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return bool(others) and all(logprob <= _NONE for logprob in others)


def read_sample(reply: Mapping[str, Any]) -> Sample:
    """The sample that a reply of ``/inference/v1/generate`` holds.

    Raises
    ------
    EngineError
        A field is missing or of another type, or ids and logprobs do not agree.
    """
    try:
        (choice,) = reply["choices"]
        ids = [int(token) for token in choice["token_ids"]]
        output_ids = np.array(ids, np.int32)
        scored = choice["logprobs"]["content"]
        logprobs = [float(item["logprob"]) for item in scored]
        labels = [str(item["token"]) for item in scored]
        finish = choice["finish_reason"]
        if not isinstance(finish, str):
            # as of a stream that ended before the reply did
            raise TypeError(f"finish_reason is {finish!r}")
        usage = reply.get("usage") or {}
        consumed = usage.get("prompt_tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        version = reply.get("weight_version")
    except UNREADABLE as error:
        raise EngineError(
            f"the vLLM server's reply to {_GENERATE} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    if labels != [f"token_id:{token}" for token in ids]:
        raise EngineError(
            f"the vLLM server gave logprobs of {len(labels)} tokens for {len(ids)} "
            "output ids, or of other tokens"
        )
    spans = () if version is None else (WeightSpan(str(version), 0, len(ids)),)
    return Sample(
        output_ids=output_ids,
        output_logprobs=np.array(logprobs, np.float32),
        finish_reason=finish,
        weight_versions=spans,
        cached_tokens=cached if isinstance(cached, int) else None,
        prompt_tokens=consumed if isinstance(consumed, int) else None,
    )


class Gathered:
    """The events of one streamed reply, put together. Each holds what is new."""

    def __init__(self) -> None:
        self._choice: Json = {"finish_reason": None}
        self._ids: list[int] = []
        self._scored: list[object] = []
        self.reply: Json = {"choices": [self._choice]}

    def take(self, event: Mapping[str, Any]) -> list[int]:
        """The ids that an event adds.

        Raises
        ------
        EngineError
            It cannot be read.
        """
        new: list[int] = []
        try:
            for choice in event["choices"]:
                new += [int(token) for token in choice["token_ids"] or ()]
                self._scored += (choice.get("logprobs") or {}).get("content") or ()
                if choice.get("finish_reason") is not None:
                    self._choice["finish_reason"] = choice["finish_reason"]
        except UNREADABLE as error:
            raise EngineError(
                f"the vLLM server's stream of {_GENERATE} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._ids += new
        self._choice |= {"token_ids": self._ids, "logprobs": {"content": self._scored}}
        self.reply |= {
            name: event[name] for name in ("usage", "weight_version") if name in event
        }
        return new


def _sampling_params(sampling: Sampling) -> Json:
    named = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "seed": sampling.seed,
    }
    given = {name: value for name, value in named.items() if value is not None}
    params = {**_UNSHAPED, **sampling.extra, **given, **_AS_SAMPLED}
    if params["temperature"] == 0:
        params |= {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    return params


def _shapes(params: Json) -> list[str]:
    """The parameters that change what is sampled from."""
    neutral = {**_UNSHAPED, **_SHAPING}
    return [
        name
        for name, value in neutral.items()
        if params.get(name, value) not in (value, *((0,) if name == "top_k" else ()))
    ]
