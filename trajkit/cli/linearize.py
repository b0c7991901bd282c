"""``trajkit linearize``: a file of turns into a file of training rows."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict

import pyarrow as pa

import trajkit as tk
from trajkit.cli.file_options import job_options, print_written
from trajkit.cli.options import (
    add_facts,
    chosen_policy,
    command,
    known_sessions,
)
from trajkit.cli.progress import Progress
from trajkit.cli.text import share, text_table
from trajkit.io.run import facts_digest
from trajkit.schema import LOSSES
from trajkit.turns.session_metadata import session_facts


@command(
    "linearize",
    """
write the training rows of recorded turns

Write the training rows of recorded turns, and print how many sampled tokens are trained,
and why others are lost.

source, --json
-o --out OUT!  rows: Parquet, Arrow IPC or JSONL, by suffix; or DIRECTORY/ for parts,
                  where an interrupted run continues
--policy, --set, --fork-threshold, --max-row-tokens, --weigh-by
--threads N       in addition to those that read and write (default: 1)
--layout {full,suffix}  suffix: write tokens that rows share only once (default:
                  %(default)s)
--report FILE     write the report, a line per session
--gather, --rejected
""",
    extend=add_facts,
    writes="rows",
)
def run(arguments: argparse.Namespace) -> None:
    """Write the rows and print the totals."""
    policy, sessions = chosen_policy(arguments), known_sessions(arguments.sessions)
    options = {
        "reward": arguments.reward,
        "sessions": sessions,
        "max_row_tokens": arguments.max_row_tokens,
        "layout": arguments.layout,
        "threads": arguments.threads or 1,
    }

    def stage(turns: pa.Table) -> dict[str, Iterable[pa.RecordBatch]]:
        report: list[pa.RecordBatch] = []
        rows = tk.linearize_batches(turns, policy, report=report, **options)
        if arguments.weigh_by != "token":  # the weights that rows have
            rows = tk.add_weights_batches(rows, arguments.weigh_by)
        return {"rows": rows, "report": report}

    outputs = {"rows": arguments.out}
    if arguments.report is not None:
        outputs["report"] = arguments.report
    job = {
        "stage": "linearize",
        "policy": asdict(policy),
        "reward": facts_digest(session_facts(arguments.reward, sessions)),
        "max_row_tokens": arguments.max_row_tokens,
        "layout": arguments.layout,
        "weigh_by": arguments.weigh_by,
    }
    with Progress("linearize", "turns") as bar:
        totals = tk.run(
            *(arguments.source, stage, outputs),
            resume=job,
            **job_options(arguments, bar),
        )
    facts = {"policy": asdict(policy), **totals}
    print_written(arguments, totals, facts, describe(totals))


def describe(totals: dict[str, int]) -> str:
    """The totals as a table of tokens, for people."""
    sampled = totals["tokens_sampled"]
    lines = [("sampled", sampled, "")]
    for name in ("tokens_trained", *(f"lost_{reason}" for reason in LOSSES)):
        words = (
            name.removeprefix("tokens_").replace("lost_", "lost, ").replace("_", " ")
        )
        if totals[name] or name == "tokens_trained":
            lines.append((words, totals[name], share(totals[name], sampled)))
    lines.append(("in all rows", totals["tokens_forward"], ""))
    lines.append(("shared prefixes once", totals["tokens_forward_shared"], ""))
    head = f"sessions {totals['sessions']:,}, turns {totals['turns']:,}"
    left_out = sum(
        totals[f"rows_{why}"] for why in ("untrained", "cut", "over_max_rows")
    )
    return (
        f"{head}, rows {totals['rows']:,} and {left_out:,} left out\n\n"
        + text_table(("tokens", "count", "of sampled"), lines)
    )
