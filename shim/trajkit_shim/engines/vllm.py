"""vLLM's token-level HTTP API as an engine: ``POST /inference/v1/generate``.

Start the server with ``--enable-scale-out``, which adds the endpoint, and with
``--logprobs-mode processed_logprobs``. Without this mode the logprobs are those of the
model's distribution before temperature, ``top_p`` and so on, which is not what was
sampled from; `VLLMEngine.check` refuses such a server. Field names and behaviour as of
vLLM 0.32.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from trajkit_shim.engines import http
from trajkit_shim.engines.base import EngineRequest, Sampling
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json

# vLLM's own ids of calls are this and the request's
_PREFIX = "generate-tokens-"
# return exactly what was sampled, with its logprob
_AS_SAMPLED: Json = {
    "n": 1,
    "logprobs": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
}
# explicit, so that none of these comes from the model's generation config
_UNSHAPED: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
_GENERATE = "/inference/v1/generate"
_PAUSE, _RESUME, _LOAD = "/pause?mode=keep", "/resume", "/collective_rpc"
_RESET, _RENAME = "/reset_prefix_cache", "/update_weight_version"
_DEVELOPING = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"


class VLLMEngine(http.HttpEngine):
    """vLLM servers of one model, or a router; for the parameters see `HttpEngine`.

    Logprobs are those of the distribution that was sampled from. A greedy call is sent
    with ``top_k`` 1, for which vLLM returns them. Pauses and weight updates need a server
    with ``VLLM_SERVER_DEV_MODE=1``.
    """

    server_name = "vLLM"
    generate_path = _GENERATE
    hints = MappingProxyType(
        {_GENERATE: "start it with --enable-scale-out"}
        | dict.fromkeys((_PAUSE, _RESUME, _LOAD, _RESET, _RENAME), _DEVELOPING)
    )

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

    async def pause(self) -> None:
        """Stop sampling. Running calls keep their cache and continue after `resume`."""
        await self._order(_PAUSE, {})

    async def resume(self) -> None:
        """Continue sampling."""
        await self._order(_RESUME, {})

    async def update_weights(self, path: str, version: str) -> None:
        """Load weights from a directory that the servers can read."""
        load: Json = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._order(_LOAD, load)
        await self._order(_RESET, {})
        await self._order(_RENAME, {"new_version": version})

    def _body(self, request: EngineRequest) -> tuple[Json, dict[str, str]]:
        named = http.sampling_fields(request.sampling, {"max_new_tokens": "max_tokens"})
        if "structural_tag" in named:
            named["structured_outputs"] = {
                "structural_tag": named.pop("structural_tag")
            }
        own: dict[str, Any] = {**_UNSHAPED, **request.sampling.extra}
        params = {**own, **named, **_AS_SAMPLED}
        if params["temperature"] == 0:
            params |= {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
        if self.sampling_masks and params["top_k"] <= 0:
            raise EngineError(
                "vLLM returns sampling masks only for calls with top_k: set top_k in the "
                "sampling of the session",
                400,
            )
        body: Json = {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": params,
            # a grammar holds from the first token, whatever parser the server has
            "reasoning_ended": True,
        }
        if self._check_prompts:
            body["return_token_ids"] = True
        # for routers: a session stays on one prefix cache, a request keeps its id
        headers = {"X-Session-ID": request.session_id}
        return body, {**headers, "X-Request-Id": request.request_id}

    def _answer(
        self, reply: Mapping[str, Any], request: EngineRequest
    ) -> dict[str, Any]:
        choices, usage = reply["choices"], reply["usage"]
        if [choice["index"] for choice in choices] != [0]:
            n_choices = f"{len(choices)} choices"
            raise ValueError(f"{n_choices}, but the one with index 0 was asked for")
        (choice,), mask = choices, None
        if self.sampling_masks and (mask := choice.get("sampling_mask")) is None:
            raise ValueError("gave no sampling mask: it needs --return-sampling-mask")
        details = usage.get("prompt_tokens_details") or {}
        request_id, scored = reply.get("request_id"), choice["logprobs"]["content"]
        if request_id == _PREFIX + request.request_id:
            request_id = request.request_id
        return {
            "request_id": request_id,
            "output_ids": choice["token_ids"],
            "logprobs": [(entry["logprob"], _token_of(entry)) for entry in scored],
            "finish_reason": choice["finish_reason"],
            "counts": {**usage, "cached_tokens": details.get("cached_tokens")},
            "weight_versions": choice.get("weight_versions"),
            "prompt_ids": reply.get("prompt_token_ids"),
            "sampling_mask": mask,
            "routed_experts": choice.get("routed_experts"),
        }

    def _abort(self, request_id: str) -> tuple[str, Json]:
        path = "/inference/v1/abort_requests"
        return path, {"request_ids": [_PREFIX + request_id]}


def _token_of(entry: Mapping[str, Any]) -> object:
    """The id that a logprob is of; some servers write it as ``token_id:17``."""
    if "token_id" in entry:
        return entry["token_id"]
    prefix, _, number = entry["token"].partition(":")
    return int(number) if prefix == "token_id" and number.isdecimal() else number
