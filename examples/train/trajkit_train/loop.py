"""The two halves of the training demo: a warm start on scripted runs, and the loop."""

import math
import random
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import trajkit as tk
from trajkit.learn import advantages
from trajkit.torch import PackDataset, edge_logprobs, nll_loss, policy_loss
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines.base import Engine
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog
from trajkit_train.agents import Demonstrator, Gateway
from trajkit_train.model import make_model, make_tokenizer
from trajkit_train.settings import Settings
from trajkit_train.task import make_task
from trajkit_train.torch_engine import TorchEngine

# the longest reply is 14 tokens
_MAX_NEW_TOKENS = 32
_WARM_TOKENS = 2048  # of one optimizer step
_WARM_RATE = 5e-3


def warm_start(out: Path, seed: int, settings: Settings) -> dict[str, Any]:
    """Train a new model on scripted runs, and save it below ``out``.

    The scripted agent errs often, and so does the model that imitates it.
    """
    out = out / "warm-start" / str(seed)
    started = time.monotonic()
    tasks = [make_task(f"{seed}.warm.{i}") for i in range(settings.warm_runs)]
    tokenizer = make_tokenizer()
    with _gateway(Demonstrator(tokenizer), out, settings) as (gateway, log):
        sessions = gateway.rollouts(tasks, 1)
    rows = tk.linearize(_turns_of(sessions, log), sessions=sessions)
    packs = PackDataset(tk.pack(rows, settings.pack_tokens))
    model: Any = make_model(
        len(tokenizer), seed=seed, width=settings.width, layers=settings.layers
    )
    optimizer = _optimizer(model.to(settings.device), _WARM_RATE)
    draw = random.Random(seed)
    loss = math.nan
    for step in range(settings.warm_steps):
        rate = min((step + 1) / 20, 2 * (1 - step / settings.warm_steps), 1)
        optimizer.param_groups[0]["lr"] = _WARM_RATE * rate
        n_packs = max(_WARM_TOKENS // settings.pack_tokens, 1)
        batch = draw.choices(packs, k=n_packs)
        total = sum(float(pack.edge_weight.sum()) for pack in batch)
        loss = 0.0
        for pack in batch:
            part = nll_loss(edge_logprobs(model, pack), pack) / total
            part.backward()
            loss += part.item()
        _update(model, optimizer)
    model.save_pretrained(out / "model")
    return {
        "seed": seed,
        "scripted_runs": len(sessions),
        "scripted_reward": pc.mean(sessions["reward"]).as_py(),
        "loss": loss,
        "seconds": time.monotonic() - started,
    }


def train(
    out: Path, seed: int, policy: str, settings: Settings
) -> list[dict[str, Any]]:
    """Train the model of the warm start on rollouts of itself; one line per step.

    A folder below ``out`` gets the turn log and the weights.
    """
    start = out / "warm-start" / str(seed) / "model"
    out = out / policy / str(seed)
    weights = out / "model"

    def load(attention: str) -> Any:
        model: Any = LlamaForCausalLM.from_pretrained(
            start, attn_implementation=attention
        )
        return model.to(settings.device)

    model = load("trajkit")
    optimizer = _optimizer(model, settings.learning_rate)
    engine = TorchEngine(load("sdpa"), version="warm-start")
    think = make_tokenizer().get_vocab()["<think>"]
    lines = []
    with _gateway(engine, out, settings) as (gateway, log):
        for step in range(settings.steps):
            started = time.monotonic()
            tasks = [make_task(f"{seed}.{step}.{i}") for i in range(settings.tasks)]
            sessions = gateway.rollouts(tasks, settings.samples)
            sampled = time.monotonic()
            turns = _turns_of(sessions, log)
            outputs = turns["output_ids"]
            thinks = pc.equal(pc.list_element(outputs, 0), think)
            learned = learn(model, optimizer, turns, sessions, policy, settings)
            model.save_pretrained(weights)
            version = f"step-{step + 1}"
            update = {"model_path": str(weights), "weight_version": version}
            gateway.post("/engine/pause", {})
            gateway.post("/engine/update", update)
            gateway.post("/engine/resume", {})
            line = {
                "seed": seed,
                "policy": policy,
                "step": step,
                "reward": pc.mean(sessions["reward"]).as_py(),
                # of what was sampled
                "digest": f"{zlib.crc32(repr(outputs.to_pylist()).encode()):08x}",
                # the share of replies that begin with reasoning
                "thinking": pc.mean(thinks).as_py(),
                **learned,
                "rollout_seconds": sampled - started,
                "seconds": time.monotonic() - started,
            }
            lines.append(line)
    return lines


def _turns_of(sessions: pa.Table, log: Path) -> pa.Table:
    """The turns of these sessions, in an order that does not depend on timing."""
    turns = tk.read_turns(log)
    own = pc.is_in(turns["session_id"], sessions["session_id"].combine_chunks())
    order = [("session_id", "ascending"), ("turn_index", "ascending")]
    return turns.filter(own).sort_by(order)


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    turns: pa.Table,
    sessions: pa.Table,
    policy: str,
    settings: Settings,
) -> dict[str, Any]:
    """Make the rows of a policy, pack them, take a step, and return what it took.

    ``mismatch_mean`` and ``mismatch_max`` compare the logprobs that the engine recorded
    with those of the same weights over the packs, in nats per trained token.
    """
    rows = tk.linearize(turns, policy, sessions=sessions)
    report = tk.report(turns, policy, sessions=sessions)
    scored = advantages(report, "group_mean", scale="group_std")
    rows = tk.add_advantages(rows, scored)
    table = tk.pack(rows, settings.pack_tokens, columns=["advantage"])
    dataset = PackDataset(table)
    packs = [dataset[index] for index in range(len(dataset))]
    apart, loss = [], 0.0
    for epoch in range(settings.epochs):
        for pack in packs:
            logprobs = edge_logprobs(model, pack)
            part = policy_loss(logprobs, pack, clip=settings.clip) / len(sessions)
            part.backward()
            loss += part.item()
            if not epoch:
                apart.append((logprobs.detach().cpu() - pack.edge_logprob).abs())
        _update(model, optimizer)
    mismatch = torch.cat(apart)
    counts = ("rows", "tokens_sampled", "tokens_trained", "tokens_forward")
    return {
        **{name: pc.sum(report[name]).as_py() for name in counts},
        "tokens_packed": sum(len(pack.input_ids) for pack in packs),
        "mismatch_mean": mismatch.mean().item(),
        "mismatch_max": mismatch.max().item(),
        "loss": loss,
    }


@contextmanager
def _gateway(
    engine: Engine, out: Path, settings: Settings
) -> Iterator[tuple[Gateway, Path]]:
    """A gateway over an engine, and the directory of its log."""
    log = out / "log"
    app = create_app(
        engine,
        ChatRenderer(make_tokenizer()),
        TurnLog(log, attributed=False),
        Options(
            max_new_tokens=_MAX_NEW_TOKENS, prompts=settings.prompts, attributed=False
        ),
    )
    # httpx closes idle connections above a limit, even one that a thread is about to use
    limits = httpx.Limits(max_connections=None)
    with (
        running(app) as url,
        httpx.Client(
            base_url=url, timeout=None, limits=limits, trust_env=False
        ) as client,
    ):
        yield Gateway(client), log


def _optimizer(model: PreTrainedModel, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)


def _update(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
