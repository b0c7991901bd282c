"""Random sessions under random policies: every way to rows gives the same rows.

``python -m tests.fuzz MODE`` draws sessions of 1 to 300 calls and a policy, a preset
or any valid choices, compares, and goes on with others. MODE is

twins
    links, rows, payloads and report against slow implementations;
forms
    the table against its delta forms, the recorder, streams, threads and stored rows, and
    `trajkit.verify` finds nothing.

A case that fails is made smaller (sessions, calls and choices left out), and stored in
``tests/regressions``, which ``tests/test_regressions.py`` runs again. The exit code is 1
where a case failed. One seed is one case: a process that dies is run again from
the seed that it printed. `tests.fuzz.files` does the same for damaged files.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from tests import against_twins
from tests.fuzz.payloads import (
    COLUMNS,
    PAYLOADS,
    columns,
    payload_difference,
    with_payloads,
)
from tests.fuzz.sessions import (
    Turn,
    growing,
    n_calls,
    random_policy,
    session,
    with_parents,
)
from tests.made_tables import (
    by_session,
    in_delta_form,
    linearized,
    streamed,
    turns_table,
)
from trajkit import schema
from trajkit.files.tables import decoded, encoded
from trajkit.tables import limits

REGRESSIONS = Path(__file__).parents[1] / "regressions"
_AT_ONCE = {"twins": 40, "forms": 400}
_FORMS_AT_ONCE = 3
_SMALL = 60
"""Of the forms a case compares so many, or all if it has no more calls than this."""
_FIELDS = ("step", "started_at", *schema.ROUTING.names[2:])


@dataclass(frozen=True, slots=True)
class Case:
    """Sessions, and what is done with them."""

    mode: str
    policy: str
    choices: dict[str, Any]
    max_row_tokens: int | None
    seed: int
    turns: list[Turn]

    @classmethod
    def read(cls, path: Path) -> "Case":
        """A stored case."""
        return cls(**json.loads(path.read_text("utf-8")))

    def write(self, folder: Path) -> Path:
        """Store the case under a name of its own."""
        path = folder / f"{self.mode}-{self.policy}-{self.seed}.json"
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")
        return path


def drawn_case(
    mode: str,
    seed: int,
    preset: str | None = None,
    n_sessions: int | None = None,
    longest: int = 300,
) -> Case:
    """Sessions, and a preset or choices that differ from it, from a seed."""
    draw = Random(seed)
    sizes = [n_calls(draw, longest) for _ in range(n_sessions or _AT_ONCE[mode])]
    name, choices = random_policy(draw, preset)
    # sessions that a way to find parents is made for
    route = tk.policy(name, **choices).parent_by
    ways = [session, {"prompts": growing, "prefix": with_parents}.get(route, session)]
    gaps = draw.random() < 0.2
    turns = []
    for k, size in enumerate(sizes):
        index = draw.choice([0, 3]) if gaps else 0
        for one in draw.choice(ways)(draw, size):
            turns.append({"session_id": f"s{k}", "turn_index": index, **one})
            index += draw.choice([1, 1, 4]) if gaps else 1
    limit = draw.choice([None, None, draw.randint(1, 12), draw.randint(12, 120)])
    return Case(mode, name, choices, limit, seed, turns)


def difference(case: Case) -> str | None:
    """What differs in a case, or None."""
    try:
        if case.choices.get("missing_logprobs") == "raise":
            lacking = _lacking_logprobs(case)
            said = _not_refused(case, lacking)
            turns = [one for one in case.turns if one["session_id"] not in lacking]
            if said is not None or not turns:
                return said
            case = replace(case, turns=turns)
        return (_from_twins if case.mode == "twins" else _between_forms)(case)
    except (tk.TrajkitError, AssertionError, IndexError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _policy(case: Case) -> tk.Policy:
    choices = dict(case.choices)
    if "dispatch_tools" in choices:  # JSON knows no tuples
        choices["dispatch_tools"] = tuple(choices["dispatch_tools"])
    return tk.policy(case.policy, **choices)


def _lacking_logprobs(case: Case) -> list[str]:
    """Sessions with a token that may train and has no logprob."""
    train_aborted = _policy(case).train_aborted
    found = {}
    for turn in case.turns:
        if turn["trainable"] is False:
            continue
        if turn["finish_reason"] == "abort" and not train_aborted:
            continue
        n = len(turn["output_ids"])
        mask = turn["output_mask"] or [True] * n
        logprobs = turn["output_logprobs"] or [None] * n
        if any(may and p is None for may, p in zip(mask, logprobs, strict=True)):
            found[turn["session_id"]] = True
    return list(found)


def _not_refused(case: Case, names: list[str]) -> str | None:
    """What takes one of these sessions although a logprob is missing, or None."""
    for name in names[:3]:
        turns = by_session(case.turns)[name]
        table = turns_table(turns)
        recorder = tk.Recorder()
        for turn in turns:
            recorder.record("s", **_call_of(turn))
        forms: dict[str, Callable[[], object]] = {
            "table": partial(tk.linearize, table, _policy(case)),
            "delta": partial(tk.linearize, tk.compact(table), _policy(case)),
            "recorder": partial(tk.linearize, recorder.turns("s"), _policy(case)),
        }
        for form, made in forms.items():
            try:
                made()
            except tk.errors.InvalidTurnsError as error:
                if "sampled tokens have no logprob" in str(error):
                    continue
                raise
            return f"{form}: {name} lacks a logprob and is not refused"
    return None


def _call_of(turn: Turn) -> Turn:
    """What `Recorder.record` takes of a turn, its other columns as payloads."""
    taken = {k: v for k, v in turn.items() if k not in ("session_id", "turn_index")}
    names = {*_FIELDS, *COLUMNS}
    extra = {k: taken.pop(k) for k in list(taken) if k in names}
    payloads = {k: v for k, v in extra.items() if v is not None}
    return {**taken, "payloads": payloads}


def _from_twins(case: Case) -> str | None:
    policy, limit = _policy(case), case.max_row_tokens
    found: str | None = against_twins.difference(case.turns, policy, limit)
    if found is not None:
        return found
    table, turns = _paid(case)
    rows = tk.linearize(table, policy, max_row_tokens=limit, payloads=PAYLOADS)
    return payload_difference(rows.to_pylist(), turns, policy)


def _paid(case: Case) -> tuple[pa.Table, list[Turn]]:
    """The turns of a case with payloads, as a table and as dicts."""
    table = turns_table(case.turns)
    values = columns(tk.compact(table), case.turns, case.seed)
    turns = [
        {**turn, **{name: column[k] for name, column in values.items()}}
        for k, turn in enumerate(case.turns)
    ]
    return with_payloads(table, values), turns


def _between_forms(case: Case) -> str | None:
    policy = _policy(case)
    draw = Random(case.seed)
    table, turns = _paid(case)
    case = replace(case, turns=turns)
    options: dict[str, Any] = {
        "max_row_tokens": case.max_row_tokens,
        "reward": 1.0,
        "payloads": PAYLOADS,
    }
    rows, report = linearized(table, policy, threads=1, **options)
    rows.validate(full=True)

    def same(form: str, found: tuple[pa.Table, pa.Table] | str | None) -> str | None:
        if isinstance(found, str) or found is None:
            return found
        for name, one, other in zip(
            ("rows", "report"), (rows, report), found, strict=True
        ):
            if not one.equals(other):
                return f"{form}: other {name}"
        return None

    checks: list[Callable[[], str | None]] = [
        lambda: same("delta", linearized(tk.compact(table), policy, **options)),
        lambda: same("links", _with_links(table, policy, options)),
        lambda: same("threads", _on_threads(table, policy, draw, options)),
        lambda: same("stream", _streamed(table, policy, draw, options)),
        lambda: _stored(rows),
        lambda: same("recorder", _recorded(case, policy, draw, options)),
        lambda: _verified(case, table, rows),
        lambda: _added_up(report),
        lambda: _by_chance(case, policy, draw, options),
    ]
    small = len(case.turns) <= _SMALL
    for check in checks if small else draw.sample(checks, _FORMS_AT_ONCE):
        said = check()
        if said is not None:
            return said
    return None


def _with_links(
    table: pa.Table, policy: tk.Policy, options: dict[str, Any]
) -> tuple[pa.Table, pa.Table] | str:
    """With links and drift that were computed before."""
    links = tk.link(table, policy)
    tk.validate(links)
    if not tk.link(tk.compact(table), policy).equals(links):
        return "delta: other links"
    known = {"links": links, "drift": tk.classify_drift(table, links)}
    with mock.patch.object(limits, "PART_TOKENS", 100):
        made: tuple[pa.Table, pa.Table] = linearized(table, policy, **known, **options)
    return made


def _on_threads(
    table: pa.Table, policy: tk.Policy, draw: Random, options: dict[str, Any]
) -> tuple[pa.Table, pa.Table]:
    least = draw.choice([1, 10, 200])
    small = {"MIN_PART_TOKENS": least, "PART_TOKENS": 8 * least}
    small |= {"BATCH_TOKENS": least, "HELD_ROW_TOKENS": 8 * least}
    with mock.patch.multiple(limits, **small):
        turns = draw.choice([table, tk.compact(table)])
        made: tuple[pa.Table, pa.Table] = linearized(
            turns, policy, threads=draw.randint(1, 4), **options
        )
    return made


def _streamed(
    table: pa.Table, policy: tk.Policy, draw: Random, options: dict[str, Any]
) -> tuple[pa.Table, pa.Table]:
    table = draw.choice([table, tk.compact(table)])

    def batches() -> Iterator[pa.RecordBatch]:
        at = 0
        most = draw.choice([5, 40, 400])
        while at < table.num_rows:
            size = draw.randint(1, most)
            yield from table.slice(at, size).combine_chunks().to_batches()
            at += size

    rows, counts = streamed(batches(), policy, threads=draw.randint(1, 2), **options)
    return pa.Table.from_batches(rows), pa.Table.from_batches(counts)


def _stored(rows: pa.Table) -> str | None:
    if not decoded(encoded(rows)).equals(rows):
        return "dedup: the rows of the file are others"
    return None


def _recorded(
    case: Case, policy: tk.Policy, draw: Random, options: dict[str, Any]
) -> tuple[pa.Table, pa.Table] | None:
    """From the turns of a recorder that took the sessions' calls in turns.

    None: it counts turns itself, and theirs have gaps.
    """
    recorder = tk.Recorder()
    waiting = by_session(case.turns)
    if any(
        turn["turn_index"] != k
        for turns in waiting.values()
        for k, turn in enumerate(turns)
    ):
        return None
    calls = {name: iter(turns) for name, turns in waiting.items()}
    order = [name for name, turns in waiting.items() for _ in turns]
    draw.shuffle(order)
    for name in order:
        recorder.record(name, **_call_of(next(calls[name])))
    turns = pa.concat_tables(
        [recorder.turns(name) for name in waiting], promote_options="permissive"
    )
    made: tuple[pa.Table, pa.Table] = linearized(turns, policy, **options)
    return made


def _verified(case: Case, table: pa.Table, rows: pa.Table) -> str | None:
    limit, policy = case.max_row_tokens, _policy(case)
    if policy.on_drift == "splice":  # which has many readings of long sessions
        names = [
            name for name, turns in by_session(case.turns).items() if len(turns) < 5
        ]
        table, rows = (
            one.filter(pc.is_in(one["session_id"], value_set=pa.array(names)))
            for one in (table, rows)
        )
    found = tk.verify(rows, table, policy, max_row_tokens=limit, reward=1.0)
    return f"verify: {found.to_pylist()[:3]}" if found.num_rows else None


def _added_up(report: pa.Table) -> str | None:
    """Every sampled token is trained, or lost for one reason."""
    for line in report.to_pylist():
        lost = sum(n for name, n in line.items() if name.startswith("lost_"))
        if line["tokens_sampled"] != line["tokens_trained"] + lost:
            return f"{line['session_id']}: sampled tokens are not trained and lost ones"
    return None


def _by_chance(
    case: Case, policy: tk.Policy, draw: Random, options: dict[str, Any]
) -> str | None:
    """A delta form with bases at random, of some of the short sessions."""
    turns = [
        turn
        for some in by_session(case.turns).values()
        if len(some) <= 12 and draw.random() < 0.1
        for turn in some
    ]
    if not turns:
        return None
    table = turns_table(turns)
    delta = in_delta_form(table, draw.choice)
    for field in (*_FIELDS, *COLUMNS):
        if field in table.column_names:  # stored cases may be older
            delta = delta.append_column(field, table[field])
    made = linearized(delta, policy, **options)
    whole = linearized(table, policy, **options)
    return None if made == whole else "delta by chance: other rows or another report"


def reduced(case: Case, seconds: float = 300) -> Case:
    """The case with as much left out as lets it differ, in so many seconds."""
    end = time.monotonic() + seconds

    def tried(**fields: object) -> bool:
        nonlocal case
        smaller = replace(case, **fields)
        if time.monotonic() > end or not smaller.turns or difference(smaller) is None:
            return False
        case = smaller
        return True

    def leave_out(groups: list[list[Turn]]) -> None:
        """Runs of groups, halves first."""
        size = -(-len(groups) // 2)
        while size:
            at = 0
            while at < len(groups):
                left = groups[:at] + groups[at + size :]
                if tried(turns=_renumbered([turn for some in left for turn in some])):
                    groups = left
                else:
                    at += size
            size //= 2

    leave_out(list(by_session(case.turns).values()))
    leave_out([[turn] for turn in case.turns])
    for choice in list(case.choices):
        tried(choices={k: v for k, v in case.choices.items() if k != choice})
    tried(max_row_tokens=None)
    return case


def _renumbered(turns: list[Turn]) -> list[Turn]:
    counts: dict[str, int] = {}
    found = []
    for turn in turns:
        index = counts[turn["session_id"]] = counts.get(turn["session_id"], -1) + 1
        found.append({**turn, "turn_index": index})
    return found


def run(mode: str, seed: int, n_sessions: int, seconds: float) -> int:
    """Cases from a seed on, until there were so many sessions, or seconds, or 5 failed.

    Returns the number of cases that failed.
    """
    start = time.monotonic()
    done = calls = failed = longest = 0
    first = seed
    print(f"{mode}: seeds from {first} on", flush=True)
    while done < n_sessions and time.monotonic() - start < seconds and failed < 5:
        case = drawn_case(mode, seed)
        said = difference(case)
        if said is not None:
            failed += 1
            print(f"{mode} seed {seed}: {said}", flush=True)
            small = reduced(case)
            print(f"  {difference(small)}: {small.write(REGRESSIONS)}", flush=True)
        sizes = [len(turns) for turns in by_session(case.turns).values()]
        done += len(sizes)
        calls += len(case.turns)
        longest = max(longest, *sizes)
        seed += 1
    print(
        f"{mode}: seeds {first} to {seed - 1}: {done} sessions of 1 to {longest} calls, "
        f"{calls} calls, {failed} failed, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return failed


def main() -> int:
    """Run cases of a mode; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=["twins", "forms"])
    parser.add_argument("--sessions", type=int, default=1_000_000_000, help="at least")
    parser.add_argument("--seed", type=int, help="of the first case")
    parser.add_argument("--seconds", type=float, default=60, help="at most")
    given = parser.parse_args()
    seed = SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    return 1 if run(given.mode, seed, given.sessions, given.seconds) else 0
