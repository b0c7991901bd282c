"""SGLang's native HTTP API as an engine: ``POST /generate`` with token ids both ways.

Field names and behaviour as of SGLang 0.5.23.
"""

import asyncio
import base64
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np

from trajkit_shim.engines import base, http
from trajkit_shim.engines.routed_experts import read_experts
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json

# return exactly what was sampled: no text is trimmed, joined or removed
_AS_SAMPLED: Json = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
# Tokens per stream event. If each event repeats all earlier ones, the number of events
# is bounded instead, or a long reply would consist mostly of repetitions.
_TOKENS_PER_EVENT = 8
_REPEATING_EVENTS = 128


class SGLangEngine(http.HttpEngine):
    """SGLang servers of one model, or a router; for most parameters see `HttpEngine`.

    Logprobs are those of the distribution that was sampled from. If the sampling
    parameters cut off its tail, the server is asked for the logprobs after the cut. With
    ``check_prompts`` the server returns each prompt, with ``experts_per_token`` the experts
    each token was routed to, this many per layer.
    """

    server_name = "SGLang"
    generate_path = "/generate"
    takes_images = True

    def __init__(
        self,
        *base_urls: str,
        check_prompts: bool = False,
        experts_per_token: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*base_urls, **options)
        self._check_prompts = check_prompts
        self._experts_per_token = experts_per_token
        self._preferred: Json = {}
        self._incremental = False

    async def pause(self) -> None:
        """Stop sampling. Running calls lose their cache and continue after `resume`."""
        await self._order("pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Continue sampling."""
        await self._order("continue_generation", {})

    async def update_weights(self, path: str, version: str) -> None:
        """Load weights from a directory that the servers can read."""
        body = {"model_path": path, "weight_version": version, "flush_cache": True}
        await self._update("update_weights_from_disk", body)

    async def update_tensors(
        self, tensors: Sequence[str], load_format: str | None, version: str
    ) -> None:
        """See `TensorEngine`. The texts are those of SGLang's MultiprocessingSerializer.

        Servers that began an update also end it if this call fails or is cancelled.
        """
        body: Json = {"serialized_named_tensors": list(tensors)}
        body |= {"load_format": load_format, "weight_version": version}
        body["flush_cache"] = True
        try:
            await self._update("begin_weight_update", {})
            await self._update("update_weights_from_tensor", body)
        except BaseException:
            with suppress(EngineError):
                await asyncio.shield(self._update("end_weight_update", {}))
            raise
        await asyncio.shield(self._update("end_weight_update", {}))

    async def _order(self, name: str, body: Json) -> list[Json]:
        """Send a request to all servers; return once each has answered or failed."""
        orders = [server.post(f"/{name}", body) for server in await self._members()]
        answers = await asyncio.gather(*orders, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return cast("list[Json]", answers)

    async def _update(self, name: str, body: Json) -> None:
        """Send a step of a weight update; an error has each server's weight version."""
        try:
            for answer in await self._order(name, body):
                if answer.get("success") is not True:
                    source = body.get("model_path", "")
                    failure = f"failed at {name} {source}: {answer.get('message')}"
                    raise EngineError(f"the SGLang server {failure}")
        except EngineError as error:
            versions = []
            for server in await self._members():
                version = None
                with suppress(EngineError):
                    version = (await server.get("/model_info")).get("weight_version")
                versions.append(f"{server.base_url}: {version or 'unknown'}")
            error.message += f". Weight versions: {', '.join(versions)}"
            raise

    async def info(self) -> base.EngineInfo:
        if self._info is None:
            server = (await self._members())[0]
            model = await server.get("/model_info")
            preferred = model.get("preferred_sampling_params")
            self._preferred = preferred if isinstance(preferred, dict) else {}
            with suppress(EngineError):
                options = await server.get("/server_info")
                self._incremental = options.get("incremental_streaming_output") is True
        return await super().info()

    async def _members(self) -> Sequence[http.EngineServer]:
        """See `HttpEngine`. A router passes on only calls, but lists its servers."""
        urls: list[str] = []
        for server in self._servers:
            try:
                listed = cast(Any, await server.get("/workers"))
            except EngineError as error:
                # a server has no such path; one that cannot be reached fails later
                if error.answered not in (None, 404, 405):
                    raise
                urls.append(server.base_url)
                continue
            with http.reading("SGLang", "/workers"):
                urls += [_server_url(worker["url"]) for worker in listed["workers"]]
        if not urls:
            raise EngineError("the SGLang router has no server", 503)
        client = self._servers[0].client
        return [http.EngineServer("SGLang", url, client) for url in dict.fromkeys(urls)]

    async def generate(self, request: base.EngineRequest) -> base.Sample:
        # reads the server's own sampling parameters
        await self.info()
        sampling, images = request.sampling, request.images
        named = http.sampling_fields(sampling, {"seed": "sampling_seed"})
        params = {**sampling.extra, **named, **_AS_SAMPLED}
        cut = _cuts_the_tail({**self._preferred, **params})
        # the server expands one id per image
        keep = np.ones(len(request.prompt_ids), np.bool_)
        for image in images:
            keep[image.start + 1 : image.stop] = False
        per_token = self._experts_per_token
        wanted = {
            "return_logprob": True,
            "return_sampling_mask": cut,
            "return_prompt_token_ids": self._check_prompts or len(images) > 0,
            "return_routed_experts": per_token is not None,
        }
        body: Json = {
            "rid": request.request_id,
            "input_ids": request.prompt_ids[keep].tolist(),
            "sampling_params": params,
            **{name: True for name, want in wanted.items() if want},
        }
        if images:
            body["image_data"] = await asyncio.to_thread(_data_urls, images)
        if request.on_tokens is not None:
            most = sampling.max_new_tokens // _REPEATING_EVENTS
            repeated = 0 if self._incremental else most
            params.setdefault("stream_interval", max(_TOKENS_PER_EVENT, repeated))
        reply = SGLangReply()
        await self._exchange(
            request,
            body,
            # lets a router keep a session on one prefix cache
            {"X-SMG-Routing-Key": request.session_id},
            reply.add,
            ("/abort_request", {"rid": request.request_id}),
        )
        sample = reply.sample(sampling_logprobs=cut)
        # it may have tokenized the prompt again
        if images and sample.prompt_ids is None:
            raise EngineError("the SGLang server did not return a prompt with images")
        if per_token is None:
            return sample
        packed = reply.meta.get("routed_experts")
        n_tokens = len(request.prompt_ids) + len(sample.output_ids)
        # about ten million numbers for a long call
        experts = await asyncio.to_thread(read_experts, packed, n_tokens, per_token)
        return replace(sample, routed_experts=experts)


def _server_url(worker: str) -> str:
    """The server of a router's worker; ``http://host:30000@1`` is one of its ranks."""
    url = re.sub(r"@\d+$", "", worker)
    if not url.startswith(("http://", "https://")):
        raise EngineError(
            f"the SGLang router's worker {worker} does not use HTTP, which pauses and "
            "weight updates need"
        )
    return url


def _data_urls(images: Sequence[base.PromptImage]) -> list[str]:
    return [
        f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
        for image in images
    ]


class SGLangReply:
    """Joins the events of one reply.

    An event has everything sampled so far or, with ``--incremental-streaming-output``,
    only what is new; the total token count distinguishes the two.
    """

    # lists with one element per output token
    _LISTS = ("output_token_logprobs", "output_token_sampling_logprobs")

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {}
        self._consumed: Any = None  # ids of the prompt
        self._ids: list[int] = []
        self._per_token: dict[str, list[Any]] = {}

    def add(self, event: Mapping[str, Any]) -> list[int]:
        """Add an event and return its new output ids."""
        with http.reading("SGLang", "reply to /generate"):
            self.meta = event["meta_info"]
            self._consumed = event.get("prompt_token_ids")
            ids = http.token_ids(event["output_ids"]).tolist()
            total = int(self.meta["completion_tokens"])
            known = len(self._ids)
            repeats = len(ids) == total
            if not repeats and known + len(ids) != total:
                raise ValueError(f"{len(ids)} ids after {known}, and {total} in all")
            for name in self._LISTS:
                if name in self.meta:
                    before = [] if repeats else self._per_token.get(name, [])
                    self._per_token[name] = before + list(self.meta[name])
        if repeats and ids[:known] != self._ids:
            raise EngineError("the SGLang server's stream changed ids it already sent")
        self._ids = ids if repeats else self._ids + ids
        return self._ids[known:]

    def sample(self, *, sampling_logprobs: bool) -> base.Sample:
        """Return the sample, with the logprobs before or after the tail was cut off."""
        meta, consumed = self.meta, self._consumed
        with http.reading("SGLang", "reply to /generate"):
            plain = self._per_token["output_token_logprobs"]
            scored = [(float(one[0]), int(one[1])) for one in plain]
            logprobs = http.logprobs_of(scored, self._ids)
            if sampling_logprobs:
                cut = map(float, self._per_token["output_token_sampling_logprobs"])
                logprobs = np.array([*cut], np.float32)
            return base.Sample(
                output_ids=http.token_ids(self._ids),
                output_logprobs=logprobs,
                finish_reason=str(meta["finish_reason"]["type"]),
                weight_versions=tuple(
                    base.WeightSpan(
                        str(one["version"]), int(one["start"]), int(one["end"])
                    )
                    for one in meta.get("weight_versions") or ()
                ),
                cached_tokens=http.as_count(meta.get("cached_tokens")),
                prompt_tokens=http.as_count(meta.get("prompt_tokens")),
                prompt_ids=None if consumed is None else http.token_ids(consumed),
            )


def _cuts_the_tail(params: Json) -> bool:
    """Whether some tokens cannot be sampled that the plain logprobs include."""
    top_k = params.get("top_k", -1)
    return (
        params.get("temperature") == 0
        or params.get("top_p", 1.0) != 1.0
        or params.get("min_p", 0.0) != 0.0
        # SGLang's own "no limit" is 2**30
        or (isinstance(top_k, int) and 0 < top_k < 2**30)
    )
