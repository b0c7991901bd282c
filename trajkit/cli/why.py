"""``trajkit why`` and ``trajkit tree``: sessions explained in the terminal."""

import argparse

import trajkit as tk
from trajkit.cli.options import chosen_policy, command, read_turns
from trajkit.cli.show import each_session, is_rows, of_session
from trajkit.cli.terminal import Screen, visible
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.io.tables import read_any_rows


@command(
    "why",
    """
explain why each row begins where it does

Print a sentence for each row that a policy makes: the turn that opens it, where and why
that turn leaves the path of its parent, and the tokens that the row trains and loses. Of
rows, without their turns: where each leaves an earlier row.

source TURNS|ROWS...  turns or rows: Parquet, Arrow IPC or JSON by suffix, or directories;
                      - is standard input
--session, --session-prefix, --nonfinite-logprobs
--tokenizer PATH   the model's tokenizer.json, or its directory: name causes of drift by
                   text
--policy, --set, --fork-threshold
""",
)
def run_why(arguments: argparse.Namespace) -> None:
    """Print the sentences."""
    screen = Screen.of_stdout(colour=True)
    if is_rows(arguments.source):
        table = read_any_rows(arguments.source)
        if {"spans", "suffix_mask"} & {*table.column_names}:
            table = tk.read_rows(arguments.source)
        table = of_session(table, arguments.session, "rows")
        reasons = tk.analysis.why(table)
    else:
        tokenizer = chosen_tokenizer(arguments)
        table = of_session(read_turns(arguments), arguments.session, "turns")
        reasons = tk.analysis.why(table, chosen_policy(arguments), tokenizer=tokenizer)
    session = None
    for line in reasons.select(["session_id", "sentence"]).to_pylist():
        if line["session_id"] != session:
            session = line["session_id"]
            screen.print(f"session {visible(session)}", "head")
        screen.print(f"  {line['sentence']}")


@command(
    "tree",
    """
draw the calls of each session as a tree

Print the calls of each session: which call each continues under a policy, its label if it
opens a branch, and where its prompt drifts.

source, --session, --policy, --set, --fork-threshold
""",
)
def run_tree(arguments: argparse.Namespace) -> None:
    """Print the trees."""
    screen = Screen.of_stdout(colour=True)
    turns = of_session(read_turns(arguments), arguments.session, "turns")
    policy = chosen_policy(arguments)
    for table in each_session(turns):
        session = table["session_id"][0].as_py()
        screen.print(f"session {visible(session)}", "head")
        for line in tk.analysis.call_tree(table, session, policy):
            screen.print(f"  {line}")
