"""An engine that samples from a causal language model of transformers, in this process.

It computes prompts in batches and returns the logprobs of the distribution that it drew
from. Its weights can change in the middle of a reply. Needs torch.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from trajkit_shim.engines import base
from trajkit_shim.engines.checks import check_sampling
from trajkit_shim.errors import EngineError

# calls that are sampled together, and how long they wait for one more
_MAX_BATCH = 64
_GATHER_S = 0.003


@dataclass(slots=True)
class _Call:
    """A call that is sampled or waits for it."""

    ids: list[int]  # the prompt, and what was sampled
    n_prompt: int
    sampling: base.Sampling
    draw: random.Random
    result: "asyncio.Future[base.Sample]" = field(default_factory=asyncio.Future)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # of each sampled token

    def add(self, token: int, logprob: float, version: str) -> None:
        """Append a sampled token; answer the caller if it is the last."""
        if self.result.done():
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.sampling.stop_token_ids:
            self.result.set_result(self._sample("stop"))
        elif len(self.logprobs) == self.sampling.max_new_tokens:
            self.result.set_result(self._sample("length"))

    def _sample(self, finish_reason: str) -> base.Sample:
        spans, stop = [], 0
        for version, tokens in itertools.groupby(self.versions):
            start, stop = stop, stop + len(list(tokens))
            spans.append(base.WeightSpan(version, start, stop))
        return base.Sample(
            output_ids=np.array(self.ids[self.n_prompt :], np.int32),
            output_logprobs=np.array(self.logprobs, np.float32),
            finish_reason=finish_reason,
            weight_versions=tuple(spans),
        )


class TorchEngine:
    """An `Engine` and `UpdatableEngine` over a model of transformers.

    Calls that wait are sampled together. Each draws from the complete distribution under
    its temperature, with a random generator of its own, so that a call with a ``seed``
    does not depend on the calls that it shares a batch with.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model, which the engine owns from now on.
    version : str
        The version of the weights until the first update.
    """

    takes_grammars = False

    def __init__(self, model: PreTrainedModel, *, version: str = "initial") -> None:
        self._model = model
        model.train(False)
        self._version = version
        config = model.config.get_text_config(decoder=True)
        self._info = base.EngineInfo(
            model="torch",
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_position_embeddings,
        )
        self._waiting: list[_Call] = []
        self._sampler: asyncio.Task[None] | None = None
        self._running = asyncio.Event()  # set unless paused
        self._running.set()
        self._computing = asyncio.Lock()

    async def info(self) -> base.EngineInfo:
        """See `Engine`."""
        return self._info

    async def generate(self, request: base.EngineRequest) -> base.Sample:
        """See `Engine`. Of the parameters, it takes the temperature and the seed."""
        sampling = request.sampling
        check_sampling(sampling, "torch")
        if sampling.temperature == 0:
            raise EngineError("temperature = 0 is not above 0", 400)
        ids = request.prompt_ids.tolist()
        call = _Call(ids, len(ids), sampling, random.Random(sampling.seed))
        self._waiting.append(call)
        if self._sampler is None or self._sampler.done():
            self._sampler = asyncio.create_task(self._run())
        return await call.result

    async def pause(self) -> None:
        """See `UpdatableEngine`. Running calls stop after the current token."""
        self._running.clear()
        async with self._computing:
            return

    async def update_weights(self, path: str, version: str) -> None:
        """See `UpdatableEngine`; incomplete weights, or of another shape, are rejected."""
        model: Any = self._model

        def load() -> PreTrainedModel:
            loaded, info = type(model).from_pretrained(
                path,
                config=model.config,
                dtype=model.dtype,
                attn_implementation=model.config._attn_implementation,
                output_loading_info=True,
            )
            if info["missing_keys"]:
                raise ValueError(f"missing: {', '.join(sorted(info['missing_keys']))}")
            placed: PreTrainedModel = loaded.to(model.device).eval()
            return placed

        try:
            self._model = await asyncio.to_thread(load)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"the weights in {path} do not load: {error}") from error
        self._version = version

    async def resume(self) -> None:
        """Continue sampling."""
        self._running.set()

    async def close(self) -> None:
        """Finish the calls that were accepted."""
        await self.resume()
        if self._sampler is not None:
            await self._sampler

    async def _run(self) -> None:
        """Sample batch after batch while calls wait."""
        while self._waiting:
            n_waiting = 0
            while n_waiting < len(self._waiting) < _MAX_BATCH:
                n_waiting = len(self._waiting)
                await asyncio.sleep(_GATHER_S)
            calls = self._waiting[:_MAX_BATCH]
            del self._waiting[:_MAX_BATCH]
            try:
                await self._sample(calls)
            # whatever failed, its callers must hear of it
            except Exception as error:
                failure = EngineError(f"sampling failed: {error}")
                for call in calls:
                    if not call.result.done():
                        call.result.set_exception(failure)

    async def _sample(self, calls: list[_Call]) -> None:
        """Sample a batch of calls to their ends."""
        batch: _Batch | None = None
        while not all(call.result.done() for call in calls):
            await self._running.wait()
            async with self._computing:
                # the cached keys and values are those of one set of weights
                if batch is None or batch.model is not self._model:
                    batch = _Batch(self._model, calls)
                numbers = [call.draw.random() for call in calls]
                tokens, logprobs = await asyncio.to_thread(batch.step, numbers)
            for call, token, logprob in zip(calls, tokens, logprobs, strict=True):
                call.add(token, min(logprob, 0.0), self._version)


class _Batch:
    """Calls of one batch under one version of the weights, with their cache."""

    def __init__(self, model: PreTrainedModel, calls: list[_Call]) -> None:
        self.model = model
        self._cache: Any = None
        device = model.get_input_embeddings().weight.device
        # calls are padded on the left, so that all continue at the same place
        length = max(len(call.ids) for call in calls)
        gaps = [length - len(call.ids) for call in calls]
        ids = [[0] * gap + call.ids for gap, call in zip(gaps, calls, strict=True)]
        mask = [[0] * gap + [1] * (length - gap) for gap in gaps]
        self._next = torch.tensor(ids, device=device)
        self._mask = torch.tensor(mask, device=device)
        temperatures = [call.sampling.temperature or 1.0 for call in calls]
        self._temperature = torch.tensor(temperatures, device=device)[:, None]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self, numbers: list[float]) -> tuple[list[int], list[float]]:
        """Draw the next token of every call with its number; return their logprobs too."""
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        output = self.model(
            input_ids=self._next,
            attention_mask=self._mask,
            position_ids=positions[:, -self._next.shape[1] :],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        logprobs = (output.logits[:, -1].float() / self._temperature).log_softmax(1)
        # the token whose share of [0, 1) contains the number
        reached = logprobs.double().exp().cumsum(1)
        number = torch.tensor(numbers, dtype=torch.float64, device=logprobs.device)
        part = number[:, None] * reached[:, -1:]
        token = torch.searchsorted(reached, part, right=True)
        token = token.clamp(max=logprobs.shape[1] - 1)
        self._next = token
        self._mask = torch.cat([self._mask, torch.ones_like(token)], 1)
        return token[:, 0].tolist(), logprobs.gather(1, token)[:, 0].tolist()
