"""The loop of a trainer: agents work in sessions, the model learns, the engine follows."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import torch

import trajkit as tk
from trajkit.learn import advantages
from trajkit.torch import PackDataset, edge_logprobs, policy_loss
from trajkit_train.settings import Settings

Work = Callable[[int], tuple[pa.Table, pa.Table]]


def train_steps(
    model: Any, optimizer: Any, gateway: Any, work: Work, weights: str, plan: Settings
) -> Iterator[dict[str, Any]]:
    """Yield what a step trains on, before it; ``work`` returns its turns and rewards."""
    for number in range(plan.steps):
        turns, sessions = work(number)
        report = tk.report(turns, plan.row_policy, sessions=sessions)
        scored = advantages(report, "group_mean", scale="group_std")
        rows = tk.linearize(turns, plan.row_policy, sessions=sessions)
        rows = tk.add_advantages(rows, scored)
        packs = PackDataset(tk.pack(rows, plan.pack_tokens, columns=["advantage"]))
        yield {"turns": turns, "sessions": sessions, "report": report, "packs": packs}
        for _ in range(plan.epochs):
            for pack in map(packs.__getitem__, range(len(packs))):
                loss = policy_loss(edge_logprobs(model, pack), pack, clip=plan.clip)
                (loss / len(sessions)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(weights)
        gateway.pause()
        gateway.update_weights(weights, f"step-{number + 1}")
        gateway.resume()
