"""vLLM's token-level HTTP API as an engine: ``POST /inference/v1/generate``.

Start the server with ``--enable-scale-out`` or ``--tokens-only``, which add the
endpoint, and with ``--logprobs-mode processed_logprobs``. Without the latter the
logprobs are those of the model's distribution before temperature, ``top_p`` and so on,
which is not what was sampled from; `VLLMEngine.check` refuses such a server. Field names
and behaviour as of vLLM 0.33.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trajkit_shim.engines import http
from trajkit_shim.engines.base import EngineRequest, Sample, Sampling, WeightSpan
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json

_GENERATE = "/inference/v1/generate"
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
    with ``top_k`` 1, for which vLLM returns them.
    """

    server_name = "vLLM"
    generate_path = _GENERATE

    async def check(self, request: EngineRequest) -> None:
        """With ``top_k`` 1 each sampled token has the logprob 0."""
        sampling = Sampling(max_new_tokens=8, temperature=1.0, top_k=1)
        sample = await self.generate(replace(request, sampling=sampling))
        if sample.output_logprobs is not None and sample.output_logprobs.any():
            raise EngineError(
                "the vLLM server returns the logprobs from before temperature, top_p and "
                "so on: start it with --logprobs-mode processed_logprobs"
            )

    async def generate(self, request: EngineRequest) -> Sample:
        request_id, session_id = request.request_id, request.session_id
        body: Json = {
            "request_id": request_id,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": _sampling_params(request.sampling),
        }
        if request.on_tokens is not None:
            body["stream_options"] = {"include_usage": True}
        reply = VLLMReply()
        await self._exchange(
            request,
            body,
            # for routers: a session stays on one prefix cache, a request keeps its id
            {"X-Session-ID": session_id, "X-Request-Id": request_id},
            reply.add,
            # needed if a proxy keeps the connection to the server open
            ("/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}),
        )
        return reply.sample()


class VLLMReply:
    """Joins the events of one reply. Each has only what is new."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._scored: list[Any] = []
        self._finish: object = None
        self._last: dict[str, Any] = {}

    def add(self, event: Mapping[str, Any]) -> list[int]:
        """Add an event and return its new output ids."""
        new: list[int] = []
        with http.reading("vLLM", f"reply to {_GENERATE}"):
            # the last event may have none
            indices = [choice.get("index", 0) for choice in event["choices"]]
            if indices not in ([], [0]):
                raise ValueError(f"choices {indices}, but one was asked for")
            for choice in event["choices"]:
                new += http.token_ids(choice["token_ids"] or ()).tolist()
                self._scored += (choice.get("logprobs") or {}).get("content") or ()
                self._finish = choice.get("finish_reason") or self._finish
        self._ids += new
        self._last |= {
            name: event[name] for name in ("usage", "weight_version") if name in event
        }
        return new

    def sample(self) -> Sample:
        """Return the sample of all events."""
        with http.reading("vLLM", f"reply to {_GENERATE}"):
            scored = [
                (float(one["logprob"]), str(one["token"])) for one in self._scored
            ]
            labels = [f"token_id:{token}" for token in self._ids]
            logprobs = http.logprobs_of(scored, labels)
            if not isinstance(self._finish, str):
                # a stream ended before the reply did
                raise TypeError(f"finish_reason is {self._finish!r}")
            usage = self._last.get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            version = self._last.get("weight_version")
            span = WeightSpan(str(version), 0, len(self._ids))
            return Sample(
                output_ids=http.token_ids(self._ids),
                output_logprobs=logprobs,
                finish_reason=self._finish,
                weight_versions=() if version is None else (span,),
                cached_tokens=http.as_count(details.get("cached_tokens")),
                prompt_tokens=http.as_count(usage.get("prompt_tokens")),
            )


def _sampling_params(sampling: Sampling) -> Json:
    named = http.sampling_fields(sampling, {"max_new_tokens": "max_tokens"})
    if "structural_tag" in named:
        named["structured_outputs"] = {"structural_tag": named.pop("structural_tag")}
    params = {**_UNSHAPED, **sampling.extra, **named, **_AS_SAMPLED}
    if params["temperature"] == 0:
        params |= {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    return params
