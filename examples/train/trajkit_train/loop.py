"""The two halves of the training demo: a warm start on scripted runs, and the loop."""

import math
import random
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import LlamaForCausalLM

import trajkit as tk
from trajkit.torch import PackDataset, edge_logprobs, nll_loss
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.client import GatewayClient
from trajkit_shim.engines.base import Engine
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog
from trajkit_train.agents import Agents, Demonstrator
from trajkit_train.model import make_model, make_tokenizer
from trajkit_train.settings import Settings
from trajkit_train.task import make_task
from trajkit_train.torch_engine import TorchEngine
from trajkit_train.trainer import train_steps

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
    with _gateway(Demonstrator(tokenizer), out, settings) as (agents, log):
        sessions = agents.work(tasks, 1)
    rows = tk.linearize(_turns_of(sessions, log), sessions=sessions)
    packs = PackDataset(tk.pack(rows, settings.pack_tokens))
    model: Any = make_model(
        len(tokenizer), seed=seed, width=settings.width, layers=settings.layers
    )
    optimizer = _optimizer(model.to(settings.device), _WARM_RATE)
    draw = random.Random(seed)
    loss = math.nan
    for k in range(settings.warm_steps):
        rate = min((k + 1) / 20, 2 * (1 - k / settings.warm_steps), 1)
        optimizer.param_groups[0]["lr"] = _WARM_RATE * rate
        n_packs = max(_WARM_TOKENS // settings.pack_tokens, 1)
        batch = draw.choices(packs, k=n_packs)
        total = sum(float(pack.edge_weight.sum()) for pack in batch)
        loss = 0.0
        for pack in batch:
            part = nll_loss(edge_logprobs(model, pack), pack) / total
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
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
    weights = str(out / "model")

    def load(attention: str) -> Any:
        model: Any = LlamaForCausalLM.from_pretrained(
            start, attn_implementation=attention
        )
        return model.to(settings.device)

    model = load("trajkit")
    optimizer = _optimizer(model, settings.learning_rate)
    engine = TorchEngine(load("sdpa"), version="warm-start")
    think = make_tokenizer().get_vocab()["<think>"]
    lines, clock = [], time.monotonic()
    with _gateway(engine, out, settings) as (agents, log):

        def work(step: int) -> tuple[pa.Table, pa.Table]:
            tasks = [make_task(f"{seed}.{step}.{i}") for i in range(settings.tasks)]
            sessions = agents.work(tasks, settings.samples)
            return _turns_of(sessions, log), sessions

        plan = replace(settings, row_policy=policy)
        steps = train_steps(model, optimizer, agents.gateway, work, weights, plan)
        for number, taken in enumerate(steps):
            outputs, report = taken["turns"]["output_ids"], taken["report"]
            packs = [taken["packs"][k] for k in range(len(taken["packs"]))]
            apart = torch.cat([mismatch(model, pack) for pack in packs])
            thinks = pc.equal(pc.list_element(outputs, 0), think)
            counts = ("rows", "tokens_sampled", "tokens_trained", "tokens_forward")
            line = {
                "seed": seed,
                "policy": policy,
                "step": number,
                "reward": pc.mean(taken["sessions"]["reward"]).as_py(),
                # of what was sampled
                "digest": f"{zlib.crc32(repr(outputs.to_pylist()).encode()):08x}",
                # the share of replies that begin with reasoning
                "thinking": pc.mean(thinks).as_py(),
                **{name: pc.sum(report[name]).as_py() for name in counts},
                "tokens_packed": sum(len(pack.input_ids) for pack in packs),
                "mismatch_mean": apart.mean().item(),
                "mismatch_max": apart.max().item(),
                "seconds": time.monotonic() - clock,
            }
            lines.append(line)
            clock = time.monotonic()
    return lines


@torch.no_grad()  # type: ignore[untyped-decorator]
def mismatch(model: Any, pack: Any) -> torch.Tensor:
    """How far the logprobs of a pack are from those that the engine recorded."""
    return (edge_logprobs(model, pack).cpu() - pack.edge_logprob).abs()


def _turns_of(sessions: pa.Table, log: Path) -> pa.Table:
    """The turns of sessions, in an order that does not depend on timing."""
    turns = tk.read_turns(log)
    own = pc.is_in(turns["session_id"], sessions["session_id"].combine_chunks())
    order = [("session_id", "ascending"), ("turn_index", "ascending")]
    return turns.filter(own).sort_by(order)


@contextmanager
def _gateway(
    engine: Engine, out: Path, settings: Settings
) -> Iterator[tuple[Agents, Path]]:
    """Agents at a gateway over an engine, and the directory of its log."""
    log = out / "log"
    app = create_app(
        engine,
        ChatRenderer(make_tokenizer()),
        TurnLog(log),
        Options(max_new_tokens=_MAX_NEW_TOKENS, prompts=settings.prompts),
    )
    # httpx closes idle connections above a limit, even one that a thread is about to use
    limits = httpx.Limits(max_connections=None)
    with (
        running(app) as url,
        GatewayClient(url) as client,
        httpx.Client(timeout=None, limits=limits, trust_env=False) as http,
    ):
        yield Agents(client, http), log


def _optimizer(model: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
