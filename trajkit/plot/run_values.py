"""The numbers of a run whose distributions are shown."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table
from trajkit.analysis.colors import OUTPUTS
from trajkit.analysis.run_metrics import prompt_lengths
from trajkit.turns.records import as_turns

Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Values:
    """Numbers of one kind, a number per session or turn that has one."""

    title: str
    # sessions or turns
    of: str
    numbers: Numbers

    def histogram(self) -> tuple[Numbers, Numbers]:
        """Counts, and edges of at most 20 bins; integers are not split."""
        low, high = self.numbers.min(), self.numbers.max()
        if np.issubdtype(self.numbers.dtype, np.integer) and high - low < 20:
            return np.histogram(self.numbers, np.arange(low, high + 2) - 0.5)
        return np.histogram(self.numbers, 20)


def run_values(turns: TableLike, report: TableLike) -> list[Values]:
    """Lengths, rewards, trained shares and logprobs, of a run and its report."""
    table, counts = as_turns(as_table(turns)), as_table(report)
    outputs = pc.list_value_length(table["output_ids"]).to_numpy()
    sampled = counts["tokens_sampled"].to_numpy()
    trained = counts["tokens_trained"].to_numpy()[sampled > 0]
    return [
        Values("turns per session", "sessions", counts["turns"].to_numpy()),
        Values("output tokens per turn", "turns", outputs),
        Values("context tokens per turn", "turns", prompt_lengths(table) + outputs),
        Values(
            "% of a session's sampled tokens trained",
            "sessions",
            100 * trained / sampled[sampled > 0],
        ),
        Values("reward", "sessions", counts["reward"].drop_null().to_numpy()),
        Values("mean logprob per turn", "turns", _mean_logprobs(table)),
    ]


def tokens_by_fate(line: dict[str, Any]) -> dict[str, int]:
    """Sampled tokens by what happens to them, of a line of `trajkit.schema.SIMULATION`."""
    lost = [kind for kind in OUTPUTS if kind != "trained"]
    found = {"trained": line["tokens_trained"]}
    return found | {kind: line[f"lost_{kind}"] for kind in lost}


def _mean_logprobs(turns: pa.Table) -> Numbers:
    lists = turns["output_logprobs"].combine_chunks()
    values = pc.list_flatten(lists)
    known = pa.table({"turn": pc.list_parent_indices(lists), "value": values})
    means = known.drop_null().group_by("turn").aggregate([("value", "mean")])
    return np.asarray(means["value_mean"])
