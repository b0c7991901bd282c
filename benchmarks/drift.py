"""What each policy keeps and costs on two rollouts whose replies come back changed.

    python -m benchmarks.drift

prints the table of `trajkit.simulate` for a rollout in which the second-to-last token
of every reply comes back as another, and for one in which the first 200 of 300 tokens
of every reply are gone.
"""

import argparse

import pyarrow as pa

import trajkit as tk
from benchmarks.data import quoted, rollout
from trajkit.analysis.simulation import cheapest_lossless
from trajkit.cli.data import describe


def simulated(
    shape: str, n_turns: int, context: int, reply: int
) -> tuple[int, pa.Table]:
    """Tokens of context at the last call of a rollout, and what policies make of it."""
    turns = tk.from_records(rollout("s", quoted(shape, n_turns, context, reply), shape))
    last = turns.slice(turns.num_rows - 1).to_pylist()[0]
    return len(last["prompt_ids"]) + len(last["output_ids"]), tk.simulate(turns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift")
    parser.add_argument("--turns", type=int, default=128, help="(128)")
    parser.add_argument("--context", type=int, default=131_072, help="tokens (131072)")
    parser.add_argument("--reply", type=int, default=300, help="tokens (300)")
    choices = parser.parse_args()
    for shape in ("tail_changed", "head_dropped"):
        context, table = simulated(shape, choices.turns, choices.context, choices.reply)
        print(f"{shape}: {context:,} tokens of context at the last call")
        print(describe(table, cheapest_lossless(table)))
        for line in table.to_pylist():
            print(
                f"{line['policy']:<10} forward {line['tokens_forward'] / context:8.3f}"
                f"  shared once {line['tokens_forward_shared'] / context:8.3f}"
                "  times that context"
            )
        print()


if __name__ == "__main__":
    main()
