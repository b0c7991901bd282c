"""SGLang's native HTTP API as an engine: ``POST /generate`` with token ids both ways.

Field names and behaviour as of SGLang 0.5.23.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import numpy.typing as npt

from trajkit_shim.engine import EngineError, EngineInfo, Sample, Sampling, WeightSpan
from trajkit_shim.limits import check_prompt
from trajkit_shim.wire import Json

# sampling what the ids say and nothing else: no text is trimmed, joined or left out
_AS_SAMPLED: Json = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
# a reply may take as long as it takes; a server that is there answers a dial at once
_TIMEOUT = httpx.Timeout(None, connect=10.0)


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
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._check_prompts = check_prompts
        # the number of calls under way is the sessions' business, not the pool's
        self._client = client or httpx.AsyncClient(
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._info: EngineInfo | None = None
        self._preferred: Json = {}

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length; asked of the server once."""
        if self._info is None:
            model = await self._get("/model_info")
            preferred = model.get("preferred_sampling_params")
            self._preferred = preferred if isinstance(preferred, dict) else {}
            context = self._max_context_tokens
            if context is None:
                served = await self._get("/v1/models")
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
        # a router in front of several servers keeps a session on one prefix cache
        headers = {"X-SMG-Routing-Key": session_id}
        try:
            reply = await self._post("/generate", request, headers)
        except (asyncio.CancelledError, EngineError):
            # the server would sample on for nobody
            await asyncio.shield(self._abort(request_id))
            raise
        return read_sample(reply, sampling_logprobs=cut)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _abort(self, request_id: str) -> None:
        # the call is lost anyway, and the server drops calls whose connection closes
        with contextlib.suppress(httpx.HTTPError):
            await self._client.post(
                f"{self._base_url}/abort_request",
                json={"rid": request_id},
                timeout=5.0,
            )

    async def _get(self, path: str) -> Json:
        return await self._request("GET", path, None, {})

    async def _post(self, path: str, body: Json, headers: Mapping[str, str]) -> Json:
        return await self._request("POST", path, body, headers)

    async def _request(
        self, method: str, path: str, body: Json | None, headers: Mapping[str, str]
    ) -> Json:
        try:
            response = await self._client.request(
                method, self._base_url + path, json=body, headers=headers
            )
        except httpx.HTTPError as error:
            raise EngineError(
                f"the SGLang server at {self._base_url} cannot be reached: "
                f"{type(error).__name__}: {error}"
            ) from error
        if response.status_code >= 400:
            raise _refusal(response)
        try:
            value = response.json()
        except ValueError as error:
            raise EngineError(f"{path} of the SGLang server: {error}") from error
        if not isinstance(value, dict):
            raise EngineError(f"{path} of the SGLang server gave no object: {value!r}")
        return value


def model_vocab_size(model_dir: str | Path) -> int:
    """The size of a model's embedding table, from the ``config.json`` beside it.

    Raises
    ------
    ValueError
        The file does not tell.
    OSError
        There is no such file.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text("utf-8"))
    # models of several modalities keep the language model's part apart
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ValueError(f"{model_dir}/config.json tells no vocab_size")
    return size


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
    except (LookupError, TypeError, ValueError) as error:
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
        output_ids=np.array(ids, np.int32),
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


def _refusal(response: httpx.Response) -> EngineError:
    """The error of an answer with a status of 400 and above."""
    try:
        said = response.json()["error"]["message"]
    except (LookupError, TypeError, ValueError):
        said = response.text[:400]
    # a request at fault is the client's business, all else is not
    status = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503}.get(
        response.status_code, 502
    )
    return EngineError(
        f"the SGLang server answered {response.status_code}: {said}", status
    )
