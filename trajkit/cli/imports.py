"""``trajkit import``: records of another system into a file of turns."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from cyclopts import Parameter

import trajkit as tk
from trajkit.cli.files import Reads, Writes
from trajkit.cli.options import OUT, Json, NoClobber, print_json, print_text
from trajkit.cli.screen import Progress, text_table
from trajkit.files.run import Watch
from trajkit.files.tables import write_table
from trajkit.importers import FORMATS, TARGETS
from trajkit.turns.mapping import merged_map

Format = Literal[("auto", *FORMATS)]  # type: ignore[valid-type]


def import_(
    source: Annotated[list[str], Reads("records")],
    /,
    *,
    out: Annotated[str, OUT, Writes("turns")],
    format: Annotated[Format, Parameter(name="--from")] = "auto",
    map: Annotated[
        list[str] | None,
        Parameter(
            help="where the records have a field, as FIELD=PATH,... such as "
            "session_id=trajectory_id,reward=metadata.score; or a TOML file; may be "
            f"repeated. Fields: {', '.join(TARGETS)}"
        ),
    ] = None,
    tokenizer: Annotated[str | None, Reads("tokenizer")] = None,
    chat_template: Annotated[str | None, Reads("tokenizer")] = None,
    contradicted: Literal["untrain", "train"] = "untrain",
    nonfinite_logprobs: Literal["raise", "null"] = "raise",
    report: Annotated[str | None, Writes("report")] = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> None:
    """Write turns from the records of another system.

    Records are logs, dumps, captures, databases and transcripts. Missing facts are not
    guessed: they are counted and shown, and the report lists each of them.

    Parameters
    ----------
    source
        Files, patterns, directories, addresses (s3://...), or - for standard input.
    out
        Turns: Parquet, Arrow IPC or JSONL, by suffix; - is standard output.
    format
        The format of the records; auto: by the files.
    tokenizer
        For text: the model's directory, or its tokenizer.json.
    chat_template
        For text: a template to use instead of the tokenizer's own.
    contradicted
        A turn whose usage states other numbers of tokens than it has ids: context only, or
        trained.
    nonfinite_logprobs
        Invalid logprobs (NaN, -9999): leave their record out, or make them null.
    report
        Write the report to this file: a line per record and problem.
    """
    chat_tokenizer = None
    if tokenizer is not None:
        from trajkit.cli.tokenizer import load_chat_tokenizer

        template = None if chat_template is None else Path(chat_template)
        chat_tokenizer = load_chat_tokenizer(Path(tokenizer), template)
    elif chat_template is not None:
        raise tk.errors.ArgumentError("--chat-template needs --tokenizer")
    with Progress("import", "turns") as bar:
        totals, table = tk.importers.import_file(
            source,
            out,
            format,
            map=merged_map(map),
            tokenizer=chat_tokenizer,
            contradicted=contradicted,
            nonfinite_logprobs=nonfinite_logprobs,
            watch=Watch(lambda index, done: bar.begin(index.n_turns), bar.advance),
        )
    if report is not None:
        write_table(table, report)
    problems = group(table)
    if json:
        print_json({"output": out, **totals, "problems": problems})
    else:
        print_text(describe(totals, problems, out))
    if not totals["turns"]:
        raise tk.errors.InvalidTurnsError(no_turns(problems))


def describe(totals: dict[str, int], problems: list[dict[str, Any]], out: str) -> str:
    """The totals and problems, for people."""
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
        text += f"\n{text_table(('problem', 'record', 'count', 'first'), lines)}\n"
        details = [
            f"\n{one['problem']}: {detail}"
            for one in problems
            for detail in one["details"]
        ]
        text += "".join(details) + "\n" * bool(details)
    return text + (f"\nwritten to {out}" if totals["turns"] else "")


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
