"""The loop of a trainer: agents work in sessions, the model learns, the engine follows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

import trajkit as tk
from trajkit.learn import advantages
from trajkit.torch import PackDataset, edge_logprobs, policy_loss
from trajkit_shim.client import GatewayClient
from trajkit_train.settings import Settings


def train_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    gateway: GatewayClient,
    work: Callable[[int], pa.Table],
    log: Path,
    weights: Path,
    policy: str,
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """Yield facts of each step after its update.

    ``work`` has agents work for a step and returns their sessions with rewards. ``log`` is
    the gateway's, and ``weights`` a folder that the engine can read.
    """
    for number in range(settings.steps):
        sessions, apart = work(number), []
        turns = turns_of(sessions, log)
        rows = tk.linearize(turns, policy, sessions=sessions)
        report = tk.report(turns, policy, sessions=sessions)
        scored = advantages(report, "group_mean", scale="group_std")
        rows = tk.add_advantages(rows, scored)
        packs = PackDataset(tk.pack(rows, settings.pack_tokens, columns=["advantage"]))
        for epoch in range(settings.epochs):
            for pack in (packs[k] for k in range(len(packs))):
                logprobs = edge_logprobs(model, pack)
                loss = policy_loss(logprobs, pack, clip=settings.clip) / len(sessions)
                loss.backward()
                if not epoch:
                    # from those that the engine recorded
                    apart.append((logprobs.detach().cpu() - pack.edge_logprob).abs())
            step(model, optimizer)
        model.save_pretrained(weights)
        gateway.pause()
        gateway.update_weights(str(weights), f"step-{number + 1}")
        gateway.resume()
        facts = {"sessions": sessions, "turns": turns, "report": report, "packs": packs}
        yield {"step": number, "apart": torch.cat(apart), **facts}


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Take one step along the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def turns_of(sessions: pa.Table, log: Path) -> pa.Table:
    """Return the turns of sessions, in an order that does not depend on timing."""
    turns = tk.read_turns(log)
    own = pc.is_in(turns["session_id"], sessions["session_id"].combine_chunks())
    order = [("session_id", "ascending"), ("turn_index", "ascending")]
    return turns.filter(own).sort_by(order)
