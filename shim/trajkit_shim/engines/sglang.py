"""SGLang's native HTTP API as an engine: ``POST /generate`` with token ids both ways.

Field names and behaviour as of SGLang 0.5.23.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from trajkit_shim.engines import base, http
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json

# return exactly what was sampled: no text is trimmed, joined or removed
_AS_SAMPLED: Json = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}


class SGLangEngine(http.HttpEngine):
    """SGLang servers of one model, or a router; for the parameters see `HttpEngine`.

    Logprobs are those of the distribution that was sampled from. If the sampling
    parameters cut off its tail, the server is asked for the logprobs after the cut. A
    call without a cut has no sampling mask: each id could have been drawn.
    """

    server_name = "SGLang"
    generate_path = "/generate"
    takes_images = True

    # the server's own sampling parameters, where a call has none
    _preferred: Mapping[str, object] = {}

    async def pause(self) -> None:
        """Stop sampling. Running calls lose their cache and continue after `resume`."""
        await self._order("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Continue sampling."""
        await self._order("/continue_generation", {})

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
                await self._finish(self._update("end_weight_update", {}))
            raise
        await self._finish(self._update("end_weight_update", {}))

    async def _update(self, name: str, body: Json) -> None:
        """Send a step of a weight update; an error has each server's weight version."""
        try:
            for answer in await self._order(f"/{name}", body):
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

    async def _describe(self, server: http.EngineClient) -> base.EngineInfo:
        model = await server.get("/model_info")
        preferred = model.get("preferred_sampling_params")
        self._preferred = preferred if isinstance(preferred, dict) else {}
        return await super()._describe(server)

    async def _members(self) -> Sequence[http.EngineClient]:
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
        return [self._server(url) for url in dict.fromkeys(urls)]

    def _body(self, request: base.EngineRequest) -> tuple[Json, dict[str, str]]:
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
            "input_ids": request.prompt_ids[keep].tolist(),
            "sampling_params": params,
            **{name: True for name, want in wanted.items() if want},
        }
        if images:
            body["image_data"] = [
                f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
                for image in images
            ]
        # lets a router keep a session on one prefix cache
        return body, {"X-SMG-Routing-Key": request.session_id}

    def _answer(
        self, reply: Mapping[str, Any], request: base.EngineRequest
    ) -> dict[str, Any]:
        meta, mask, finish = (
            reply["meta_info"],
            None,
            reply["meta_info"]["finish_reason"],
        )
        logprobs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
        if self._cuts(self._params(request.sampling)):
            cut = meta["output_token_sampling_logprobs"]
            if len(cut) != len(logprobs):
                counts = f"{len(cut)} of {len(logprobs)} logprobs after the cut"
                raise ValueError(counts)
            pairs = zip(cut, logprobs, strict=True)
            logprobs = [(logprob, token) for logprob, (_, token) in pairs]
            mask = meta["output_token_sampling_mask"] if self.sampling_masks else None
        consumed = reply.get("prompt_token_ids")
        if consumed is None and request.images:
            raise ValueError("no prompt_token_ids, which were asked for")
        return {
            "request_id": meta.get("id"),
            "output_ids": reply["output_ids"],
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish["type"],
            "counts": meta,
            "weight_versions": meta.get("weight_versions"),
            "prompt_ids": consumed,
            "sampling_mask": mask,
            "routed_experts": meta.get("routed_experts"),
        }

    def _abort(self, request_id: str) -> tuple[str, Json]:
        return "/abort_request", {"rid": request_id}

    @staticmethod
    def _params(sampling: base.Sampling) -> Json:
        named = http.sampling_fields(sampling, {"seed": "sampling_seed"})
        return {**sampling.extra, **named, **_AS_SAMPLED}

    def _cuts(self, params: Json) -> bool:
        """Whether some ids cannot be sampled that the plain logprobs include."""
        all_of = {**self._preferred, **params}
        top_k = all_of.get("top_k", -1)
        return (
            all_of.get("temperature") == 0
            or all_of.get("top_p", 1.0) != 1.0
            or all_of.get("min_p", 0.0) != 0.0
            # SGLang's own "no limit" is 2**30
            or (isinstance(top_k, int) and 0 < top_k < 2**30)
        )


def _server_url(worker: str) -> str:
    """The server of a router's worker; ``http://host:30000@1`` is one of its ranks."""
    url = re.sub(r"@\d+$", "", worker)
    if not url.startswith(("http://", "https://")):
        raise EngineError(
            f"the SGLang router's worker {worker} does not use HTTP, which pauses and "
            "weight updates need"
        )
    return url
