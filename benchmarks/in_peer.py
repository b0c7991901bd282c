"""The side of `benchmarks.installed_peers` that runs where a peer is installed.

    PYTHON benchmarks/in_peer.py NAME FOLDER OUTPUT REPEATS

reads the sessions of every file of the folder (JSON lists, so that every int is an object
of its own), has the peer's own function make rows of each, and writes by file the rows and
the seconds of each repetition, and the peer's version. It needs the standard library and
the peer, and nothing of trajkit.
"""

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Session = list[dict[str, Any]]
Row = dict[str, Any]

# what trainers load when they are imported says much that is not asked for here
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class Trl:
    """TRL's asynchronous GRPO: the turns of one conversation into training sequences."""

    package = "trl"

    def __init__(self) -> None:
        worker = importlib.import_module(
            "trl.experimental.async_grpo.async_rollout_worker"
        )
        self._turn, self._rows = worker.TurnRecord, worker._chain_to_sequences

    def inputs(self, session: Session) -> Any:
        return [
            self._turn(one["prompt_ids"], one["output_ids"], one["output_logprobs"])
            for one in session
        ]

    def rows(self, turns: Any) -> Any:
        return self._rows(turns, "s", 1024)[0]

    def plain(self, rows: Any) -> list[Row]:
        return [
            {
                "tokens": row.input_ids,
                "loss_mask": row.completion_mask,
                "logprobs": row.old_log_probs,
            }
            for row in rows
        ]


class SkyRL:
    """SkyRL's merge of stepwise output."""

    package = "skyrl"

    def __init__(self) -> None:
        base = importlib.import_module("skyrl.train.generators.base")
        utils = importlib.import_module("skyrl.train.generators.utils")
        self._id, self._merge = base.TrajectoryID, utils.merge_stepwise_output

    def inputs(self, session: Session) -> Any:
        n = len(session)
        outputs = [one["output_ids"] for one in session]
        return {
            "prompt_token_ids": [one["prompt_ids"] for one in session],
            "response_ids": outputs,
            "rewards": [[0.0] * len(output) for output in outputs],
            "loss_masks": [[1] * len(output) for output in outputs],
            "stop_reasons": ["stop"] * n,
            "rollout_metrics": None,
            "rollout_logprobs": [one["output_logprobs"] for one in session],
            "trajectory_ids": [self._id(instance_id="s", repetition_id=0)] * n,
            "is_last_step": [k + 1 == n for k in range(n)],
        }

    def rows(self, output: Any) -> Any:
        return self._merge(output)

    def plain(self, merged: Any) -> list[Row]:
        names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
        return [
            {
                "tokens": prompt + response,
                "loss_mask": [0] * len(prompt) + mask,
                "logprobs": [0.0] * len(prompt) + logprobs,
                "prompt_length": len(prompt),
            }
            for prompt, response, mask, logprobs in zip(
                *(merged[name] for name in names), strict=True
            )
        ]


PEERS: dict[str, Callable[[], Any]] = {"trl": Trl, "skyrl": SkyRL}


def made(peer: Any, sessions: list[Session], repeats: int) -> dict[str, Any]:
    """The rows of every session, and the seconds of the first."""
    rows = [peer.plain(peer.rows(peer.inputs(session))) for session in sessions]
    seconds = []
    for _ in range(repeats):
        inputs = peer.inputs(sessions[0])
        gc.collect()
        start = time.perf_counter()
        result = peer.rows(inputs)
        seconds.append(time.perf_counter() - start)
        del result
    return {"rows": rows, "seconds": seconds}


def main() -> None:
    name, source, target, repeats = sys.argv[1:]
    try:
        peer = PEERS[name]()
    except ModuleNotFoundError as error:
        said: dict[str, Any] = {"missing": str(error)}
    else:
        said = {"version": importlib.metadata.version(peer.package), "found": {}}
        for file in sorted(Path(source).iterdir()):
            sessions = json.loads(file.read_bytes())
            said["found"][file.stem] = made(peer, sessions, int(repeats))
            del sessions
    Path(target).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
