"""vLLM's token-level HTTP API as an engine: ``POST /inference/v1/generate``.

Start the server with ``--enable-scale-out``, which adds the endpoint, and with
``--logprobs-mode processed_logprobs``. Without the latter the logprobs are those of the
model's distribution before temperature, ``top_p`` and so on, which is not what was
sampled from; `VLLMEngine.check` refuses such a server. Field names and behaviour as of
vLLM 0.32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajkit_shim.engines import http
from trajkit_shim.engines.acceptance import Answer
from trajkit_shim.engines.base import EngineRequest, Sample, Sampling
from trajkit_shim.engines.payloads import read_npy_experts
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


class VLLMEngine(http.HttpEngine):
    """vLLM servers of one model, or a router; for the parameters see `HttpEngine`.

    Logprobs are those of the distribution that was sampled from. A greedy call is sent
    with ``top_k`` 1, for which vLLM returns them. Pauses and weight updates need a server
    with ``VLLM_SERVER_DEV_MODE=1``.
    """

    server_name = "vLLM"
    generate_path = "/inference/v1/generate"

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

    async def generate(self, request: EngineRequest) -> Sample:
        try:
            return await super().generate(request)
        except EngineError as error:
            if error.answered == 404:
                rule = "start it with --enable-scale-out"
                error.message += f" for {self.generate_path}: {rule}"
            raise

    async def pause(self) -> None:
        """Stop sampling. Running calls keep their cache and continue after `resume`."""
        await self._develop("/pause?mode=keep", {})

    async def resume(self) -> None:
        """Continue sampling."""
        await self._develop("/resume", {})

    async def update_weights(self, path: str, version: str) -> None:
        """Load weights from a directory that the servers can read."""
        load: Json = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._develop("/collective_rpc", load)
        await self._develop("/reset_prefix_cache", {})
        await self._develop("/update_weight_version", {"new_version": version})

    async def _develop(self, path: str, body: Json) -> None:
        """Send a request of vLLM's developer mode to all servers."""
        try:
            await self._order(path, body)
        except EngineError as error:
            if error.answered == 404:
                rule = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
                error.message += f" for {path}: {rule}"
            raise

    def _body(self, request: EngineRequest) -> tuple[Json, dict[str, str]]:
        params = _sampling_params(request.sampling)
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
    ) -> tuple[Answer, Sequence[str]]:
        choices = reply["choices"]
        if [choice["index"] for choice in choices] != [0]:
            n_choices = f"{len(choices)} choices"
            raise ValueError(f"{n_choices}, but the one with index 0 was asked for")
        (choice,), usage = choices, reply["usage"]
        details = usage.get("prompt_tokens_details") or {}
        output_ids, experts = choice["token_ids"], None
        if self._experts_per_token is not None:
            n_tokens = len(request.prompt_ids) + len(output_ids)
            experts = read_npy_experts(
                choice.get("routed_experts"), n_tokens, self._experts_per_token
            )
        consumed = reply.get("prompt_token_ids")
        if consumed is None and self._check_prompts:
            raise ValueError("no prompt_token_ids, which were asked for")
        mask = choice.get("sampling_mask") if self.sampling_masks else None
        if mask is None and self.sampling_masks:
            raise ValueError("gave no sampling mask: it needs --return-sampling-mask")
        answer = Answer(
            request_id=reply.get("request_id"),
            output_ids=output_ids,
            logprobs=[
                (entry["logprob"], _token_of(entry))
                for entry in choice["logprobs"]["content"]
            ],
            finish_reason=choice["finish_reason"],
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            total_tokens=usage.get("total_tokens"),
            cached_tokens=details.get("cached_tokens"),
            weight_versions=[
                (span["version"], span["start"], span["end"])
                for span in choice.get("weight_versions") or ()
            ],
            prompt_ids=consumed,
            sampling_mask=mask,
            routed_experts=experts,
        )
        return answer, [_PREFIX + request.request_id]

    def _abort(self, request_id: str) -> tuple[str, Json]:
        path = "/inference/v1/abort_requests"
        return path, {"request_ids": [_PREFIX + request_id]}


def _token_of(entry: Mapping[str, Any]) -> object:
    """The id that a logprob is of; some servers write it as ``token_id:17``."""
    if "token_id" in entry:
        return entry["token_id"]
    prefix, _, number = entry["token"].partition(":")
    return int(number) if prefix == "token_id" and number.isdecimal() else number


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    named = http.sampling_fields(sampling, {"max_new_tokens": "max_tokens"})
    if "structural_tag" in named:
        named["structured_outputs"] = {"structural_tag": named.pop("structural_tag")}
    params = {**_UNSHAPED, **sampling.extra, **named, **_AS_SAMPLED}
    if params["temperature"] == 0:
        params |= {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    return params
