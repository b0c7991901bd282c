"""``trajkit why`` and ``trajkit tree``: sessions explained in the terminal."""

import trajkit as tk
from trajkit.cli.options import (
    PolicyOption,
    Reading,
    Session,
    TokenizerPath,
    Turns,
    one_policy,
)
from trajkit.cli.screen import Screen, visible, working
from trajkit.cli.show import TurnsOrRows, each_session, is_rows, of_session
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.files.tables import read_any_rows


def why(
    source: TurnsOrRows,
    /,
    *,
    policy: PolicyOption = None,
    session: Session = None,
    tokenizer: TokenizerPath = None,
    reading: Reading | None = None,
) -> None:
    """Explain why each row begins where it does.

    Print a sentence for each row that a policy makes: the turn that opens it, where and why
    that turn leaves the path of its parent, and the tokens that the row trains and loses.
    With a tokenizer, causes of drift are named by text. Of rows, without their turns: where
    each leaves an earlier row.
    """
    screen = Screen()
    if is_rows(source):
        table = read_any_rows(source)
        if "spans" in table.column_names:
            table = tk.read_rows(source)
        reasons = tk.analysis.why(of_session(table, session, "rows"))
    else:
        loaded = chosen_tokenizer(tokenizer, source)
        turns = (reading or Reading()).turns(source)
        table = of_session(turns, session, "turns")
        with working("comparing prompts"):
            reasons = tk.analysis.why(table, one_policy(policy), tokenizer=loaded)
    last = None
    for line in reasons.select(["session_id", "sentence"]).to_pylist():
        if line["session_id"] != last:
            last = line["session_id"]
            screen.print(f"session {visible(last)}", "head")
        screen.print(f"  {line['sentence']}")


def tree(
    source: Turns,
    /,
    *,
    policy: PolicyOption = None,
    session: Session = None,
    reading: Reading | None = None,
) -> None:
    """Draw the calls of each session as a tree.

    Shown are which call each continues under a policy, its label if it opens a branch, and
    where its prompt drifts.
    """
    screen, chosen = Screen(), one_policy(policy)
    turns = of_session((reading or Reading()).turns(source), session, "turns")
    for table in each_session(turns):
        name = table["session_id"][0].as_py()
        screen.print(f"session {visible(name)}", "head")
        for line in tk.analysis.call_tree(table, name, chosen):
            screen.print(f"  {line}")
