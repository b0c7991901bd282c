"""``trajkit import``: records of another system into a file of turns."""

import argparse
import json
import sys
from typing import Any

import pyarrow as pa

import trajkit as tk
from trajkit.cli.options import command
from trajkit.cli.progress import Progress
from trajkit.cli.text import text_table
from trajkit.importers import FORMATS, TARGETS
from trajkit.io.run import Watch
from trajkit.io.tables import write_table
from trajkit.turns.mapping import merged_map


@command(
    "import",
    f"""
write turns from the records of another system

Write turns from the records of another system: logs, dumps, captures, databases,
transcripts. Missing facts are not guessed: they are counted and shown, and the report lists
each of them.

source IN             files, patterns, directories, addresses (s3://...), or - for standard
                      input
--from FORMAT         one of {", ".join(FORMATS)}, or auto: by the files (default:
                      %(default)s)
-o --out OUT!      turns: Parquet, Arrow IPC or JSONL, by suffix
--report FILE         write the report: a line per record and problem
--map FIELD=PATH,...  where the records have a field, as in
                      session_id=trajectory_id,reward=metadata.score; or a TOML file; may
                      be repeated. Fields: {", ".join(TARGETS)}
--tokenizer PATH      for text: the model's directory, or its tokenizer.json
--chat-template PATH  for text: a template to use instead of the tokenizer's own
--contradicted {{untrain,train}}  a turn whose usage states other numbers of tokens than it
                      has ids: context only, or trained (default: %(default)s)
--nonfinite-logprobs {{raise,null}}  invalid logprobs (NaN, -9999): leave their record out,
                      or make them null (default: %(default)s)
--json
""",
    from_={"dest": "format", "choices": ("auto", *FORMATS), "default": "auto"},
    source={"nargs": "+"},
    writes="turns",
    map={"action": "append", "metavar": "FIELD=PATH,..."},
)
def run(arguments: argparse.Namespace) -> None:
    """Write the turns and print the problems found."""
    tokenizer = None
    if arguments.tokenizer is not None:
        from trajkit.cli.tokenizer import load_chat_tokenizer

        tokenizer = load_chat_tokenizer(arguments.tokenizer, arguments.chat_template)
    elif arguments.chat_template is not None:
        raise tk.errors.ArgumentError("--chat-template needs --tokenizer")
    with Progress("import", "turns") as bar:
        totals, report = tk.importers.import_file(
            arguments.source,
            arguments.out,
            arguments.format,
            map=merged_map(arguments.map),
            tokenizer=tokenizer,
            contradicted=arguments.contradicted,
            nonfinite_logprobs=arguments.nonfinite_logprobs,
            watch=Watch(lambda index, done: bar.begin(index.n_turns), bar.advance),
        )
    if arguments.report is not None:
        write_table(report, arguments.report)
    problems = group(report)
    if arguments.json:
        facts = {"output": arguments.out, **totals, "problems": problems}
        text = json.dumps(facts)
    else:
        text = f"sessions {totals['sessions']:,}, turns {totals['turns']:,}\n"
        if problems:
            lines = [
                (
                    one["problem"],
                    "kept" if one["kept"] else "left out",
                    one["count"],
                    f"{one['file']}, {one['place']}",
                )
                for one in problems
            ]
            head = ("problem", "record", "count", "first")
            text += f"\n{text_table(head, lines)}\n"
            text += "".join(
                f"\n{one['problem']}: {detail}"
                for one in problems
                for detail in one["details"]
            )
            text += "\n" * any(one["details"] for one in problems)
        if totals["turns"]:
            text += f"\nwritten to {arguments.out}"
    sys.stdout.write(text + "\n")
    if not totals["turns"]:
        raise tk.errors.InvalidTurnsError(no_turns(problems))


def no_turns(problems: list[dict[str, Any]]) -> str:
    """Why an import found no turns, and what to do."""
    left = [one for one in problems if not one["kept"]]
    names = ", ".join(one["problem"] for one in left)
    text = f"0 turns, so no file was written ({names or 'no records'})"
    for one in left[:1]:
        text += f". {one['file']}, {one['place']}: {one['detail'] or one['problem']}"
    return text


def group(report: pa.Table) -> list[dict[str, Any]]:
    """Each problem of a report with its count, its first record and some details."""
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for row in report.to_pylist():
        key = row["problem"], row["kept"]
        one = groups.setdefault(key, {**row, "count": 0, "details": []})
        one["count"] += 1
        detail, details = row["detail"], one["details"]
        if detail and detail not in details and len(details) < _MOST_DETAILS:
            details.append(detail)
    return list(groups.values())


# of one problem; the report has all
_MOST_DETAILS = 4
