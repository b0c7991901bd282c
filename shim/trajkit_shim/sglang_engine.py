"""SGLang's native HTTP API as an engine: ``POST /generate`` with token ids both ways.

Field names and behaviour as of SGLang 0.5.23.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
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
from trajkit_shim.experts import read_experts
from trajkit_shim.limits import check_prompt
from trajkit_shim.model_config import config_number
from trajkit_shim.wire import Json

# sampling what the ids say and nothing else: no text is trimmed, joined or left out
_AS_SAMPLED: Json = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
# A stream brings an event per so many tokens. Where each event repeats all before it,
# there are at most so many events, or a long reply would come mostly in repetitions.
_TOKENS_PER_EVENT = 8
_REPEATING_EVENTS = 128


class SGLangEngine:
    """One SGLang server or router, reached over HTTP.

    Parameters
    ----------
    base_url : str
        ``http://127.0.0.1:30000``.
    vocab_size : int
        Of the model: `model_vocab_size`. The server does not tell, and an id outside it
        kills the server.
    max_context_tokens : int, optional
        None: what the server says.
    check_prompts : bool
        Have the server send each prompt back, to be compared with what was sent. How
        many tokens it counts is compared in any case.
    experts_per_token : int, optional
        Have the server say which experts each token was routed to; so many in each
        layer (`trajkit_shim.experts.experts_per_token`).
    client : httpx.AsyncClient, optional
        Used in place of one made here; closed with the engine.
    """

    def __init__(
        self,
        base_url: str,
        *,
        vocab_size: int,
        max_context_tokens: int | None = None,
        check_prompts: bool = False,
        experts_per_token: int | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._check_prompts = check_prompts
        self._experts_per_token = experts_per_token
        self._server = EngineServer("SGLang", base_url, client)
        self._info: EngineInfo | None = None
        self._preferred: Json = {}
        self._incremental: bool | None = None

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length; asked of the server once."""
        if self._info is None:
            model = await self._server.get("/model_info")
            preferred = model.get("preferred_sampling_params")
            self._preferred = preferred if isinstance(preferred, dict) else {}
            context = self._max_context_tokens
            if context is None:
                served = await self._server.get("/v1/models")
                try:
                    context = int(cast(Any, served)["data"][0]["max_model_len"])
                except (LookupError, TypeError, ValueError) as error:
                    raise EngineError(
                        "/v1/models of the SGLang server tells no max_model_len: "
                        f"{served!r}"
                    ) from error
            self._info = EngineInfo(
                model=str(model.get("served_model_name") or model.get("model_path")),
                vocab_size=self._vocab_size,
                max_context_tokens=context,
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

        Logprobs are those of the distribution that was sampled from: where the sampling
        parameters cut the tail off, the plain ones are not, and the server is asked for
        the others.

        Raises
        ------
        EngineError
            400: the prompt cannot be sampled from, or the server says so. 5xx: the
            server failed, cannot be reached, or its answer makes no sense.
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

    async def pause(self) -> None:
        """Sample no more. Calls under way lose their cache and go on afterwards."""
        await self._server.post("/pause_generation", {"mode": "retract"})

    async def update_weights(self, path: str, version: str) -> None:
        """Load weights from a directory that the server can read."""
        told = await self._server.post(
            "/update_weights_from_disk",
            {"model_path": path, "weight_version": version, "flush_cache": True},
        )
        if told.get("success") is not True:
            raise EngineError(
                f"the SGLang server did not take the weights of {path!r}: "
                f"{told.get('message')}"
            )

    async def resume(self) -> None:
        """Go on."""
        await self._server.post("/continue_generation", {})

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
        cut = _cuts_the_tail({**self._preferred, **params})
        request: Json = {
            "rid": request_id,
            "input_ids": prompt_ids.tolist(),
            "sampling_params": params,
            "return_logprob": True,
        }
        if cut:
            request["return_sampling_mask"] = True
        if self._check_prompts:
            request["return_prompt_token_ids"] = True
        if self._experts_per_token is not None:
            request["return_routed_experts"] = True
        # a router in front of several servers keeps a session on one prefix cache
        headers = {"X-SMG-Routing-Key": session_id}
        try:
            if on_tokens is None:
                reply = await self._server.post("/generate", request, headers)
            else:
                interval = await self._stream_interval(sampling.max_new_tokens)
                params.setdefault("stream_interval", interval)
                request["stream"] = True
                gathered = Gathered()
                async for event in self._server.events("/generate", request, headers):
                    on_tokens(gathered.take(event))
                reply = gathered.reply
        except (asyncio.CancelledError, EngineError):
            # the server would sample on for nobody
            await asyncio.shield(
                self._server.tell("/abort_request", {"rid": request_id})
            )
            raise
        sample = read_sample(reply, sampling_logprobs=cut)
        if self._experts_per_token is None:
            return sample
        packed = cast("Mapping[str, object]", reply["meta_info"]).get("routed_experts")
        n_tokens = len(prompt_ids) + len(sample.output_ids)
        per_token = self._experts_per_token
        # some ten million numbers of a long call
        experts = await asyncio.to_thread(read_experts, packed, n_tokens, per_token)
        return replace(sample, routed_experts=experts)

    async def _stream_interval(self, most: int) -> int:
        """Tokens per event of a reply of at most so many tokens."""
        if self._incremental is None:
            try:
                told = await self._server.get("/server_info")
            except EngineError:
                # a router need not know
                told = {}
            self._incremental = told.get("incremental_streaming_output") is True
        if self._incremental:
            return _TOKENS_PER_EVENT
        return max(_TOKENS_PER_EVENT, most // _REPEATING_EVENTS)


def model_vocab_size(model_dir: str | Path) -> int:
    """The size of a model's embedding table, from the ``config.json`` beside it.

    Raises
    ------
    ValueError
        The file does not tell.
    OSError
        There is no such file.
    """
    size = config_number(model_dir, "vocab_size")
    if size is None:
        raise ValueError(f"{model_dir}/config.json tells no vocab_size")
    return size


class Gathered:
    """The events of one streamed reply, put together.

    An event holds all that was sampled so far or, with
    ``--incremental-streaming-output``, what is new; how many tokens there are in all
    tells which.
    """

    # what an event holds one of per output token
    _LISTS = ("output_token_logprobs", "output_token_sampling_logprobs")

    def __init__(self) -> None:
        self.reply: Json = {}
        self._ids: list[int] = []
        self._per_token: dict[str, list[Any]] = {}

    def take(self, event: Mapping[str, Any]) -> list[int]:
        """The ids that an event adds.

        Raises
        ------
        EngineError
            It cannot be read, or does not go on where the ones before it ended.
        """
        try:
            meta = dict(event["meta_info"])
            ids = [int(token) for token in event["output_ids"]]
            total = int(meta["completion_tokens"])
            held = len(self._ids)
            whole = len(ids) == total
            if not whole and held + len(ids) != total:
                raise ValueError(f"{len(ids)} ids after {held}, and {total} in all")
            for name in self._LISTS:
                if name in meta:
                    before = [] if whole else self._per_token.get(name, [])
                    self._per_token[name] = meta[name] = before + list(meta[name])
        except UNREADABLE as error:
            raise EngineError(
                "the SGLang server's stream of /generate cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if whole and ids[:held] != self._ids:
            raise EngineError("the SGLang server's stream took back what it had told")
        self._ids = ids if whole else self._ids + ids
        self.reply = {**event, "output_ids": self._ids, "meta_info": meta}
        return self._ids[held:]


def read_sample(reply: Mapping[str, Any], *, sampling_logprobs: bool) -> Sample:
    """The sample that a reply of ``/generate`` holds.

    Parameters
    ----------
    reply : dict
        The reply's JSON.
    sampling_logprobs : bool
        Take the logprobs of the distribution after its tail was cut off, which a
        request with ``return_sampling_mask`` brings.

    Raises
    ------
    EngineError
        A field is missing or of another type, or ids and logprobs do not agree.
    """
    try:
        meta = reply["meta_info"]
        ids = [int(token) for token in reply["output_ids"]]
        output_ids = np.array(ids, np.int32)
        scored = [
            (float(item[0]), int(item[1])) for item in meta["output_token_logprobs"]
        ]
        if sampling_logprobs:
            logprobs = [float(x) for x in meta["output_token_sampling_logprobs"]]
        else:
            logprobs = [logprob for logprob, _ in scored]
        finish = str(meta["finish_reason"]["type"])
        spans = tuple(
            WeightSpan(str(item["version"]), int(item["start"]), int(item["end"]))
            for item in meta.get("weight_versions") or ()
        )
        cached = meta.get("cached_tokens")
        prompt_tokens = meta.get("prompt_tokens")
        consumed = reply.get("prompt_token_ids")
        if consumed is not None:
            consumed = np.array([int(token) for token in consumed], np.int32)
    except UNREADABLE as error:
        raise EngineError(
            f"the SGLang server's reply to /generate cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    if [token for _, token in scored] != ids:
        raise EngineError(
            f"the SGLang server gave logprobs of {len(scored)} tokens for {len(ids)} "
            "output ids, or of other tokens"
        )
    return Sample(
        output_ids=output_ids,
        output_logprobs=np.array(logprobs, np.float32),
        finish_reason=finish,
        weight_versions=spans,
        cached_tokens=cached if isinstance(cached, int) else None,
        prompt_tokens=prompt_tokens if isinstance(prompt_tokens, int) else None,
        prompt_ids=consumed,
    )


def _sampling_params(sampling: Sampling) -> Json:
    named = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "sampling_seed": sampling.seed,
    }
    given = {name: value for name, value in named.items() if value is not None}
    return {**sampling.extra, **given, **_AS_SAMPLED}


def _cuts_the_tail(params: Json) -> bool:
    """Whether some tokens cannot be sampled that the plain logprobs count in."""
    top_k = params.get("top_k", -1)
    return (
        params.get("temperature") == 0
        or params.get("top_p", 1.0) != 1.0
        or params.get("min_p", 0.0) != 0.0
        # SGLang's own "no limit" is 2**30
        or (isinstance(top_k, int) and 0 < top_k < 2**30)
    )
