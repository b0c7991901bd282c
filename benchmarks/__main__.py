"""The table of all figures: every stage, and its alternative without trajkit.

    python -m benchmarks
    python -m benchmarks --quick

prints a line of Markdown for each figure as it is measured. The measuring is that of the
other modules of this folder, which also say more about each; all of them check the answers
before they time. `--quick` takes small numbers of everything: it shows that all works,
and roughly where things stand.
"""

import argparse
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

import trajkit as tk
from benchmarks import (
    drift,
    json_in,
    memory,
    pack,
    policies,
    roofline,
    scale,
    stages,
    stream,
)
from benchmarks.compare import commit, kernel_rates, machine
from benchmarks.data import LONG, SHAPES, Size, quoted
from benchmarks.forks import FORKS
from benchmarks.lines import HEAD, Line
from benchmarks.scale import TOKENS_PER_TURN, a_token, fastest

PLAIN = "plain Python over lists"


@dataclass(frozen=True, slots=True)
class Form:
    """How much of everything is measured."""

    size: Size
    repeats: int
    shapes: tuple[str, ...]  # of the runs that every policy goes over
    sessions: int  # of each of them
    rollouts: int  # of the table that is compared with copying
    checked: int  # of those, against plain Python
    most_turns: int  # of the rollouts that grow
    most_sessions: int
    threaded: int  # rollouts of the table that one thread and two go over
    streamed: int
    sampled: int  # of those, for plain Python
    held: int  # rollouts of which memory is looked at
    packed: int  # mixed rollouts whose rows are packed
    tried: int  # of those, for tries of tokens in Python


FULL = Form(LONG, 9, (*SHAPES, *FORKS), 4, 64, 8, 1024, 128, 256, 10_000, 60, 8, 48, 24)
HALF = Size(n_turns=64, context=65_536, system=6_000, reply_min=300, reply_max=700)
QUICK = Form(HALF, 3, ("clean",), 1, 4, 4, 256, 16, 16, 60, 4, 2, 12, 6)
# for the tests: that every line comes
TINY = Form(
    Size(n_turns=8, context=2_048, system=200, reply_min=50, reply_max=100),
    *(1, ("clean",), 1, 2, 2, 64, 16, 16, 3, 2, 1, 1, 1),
)


def linearized(form: Form) -> Iterator[Line]:
    """Every policy, from full prompts."""
    for shape in form.shapes:
        sessions = [policies.calls(shape, form.size, k) for k in range(form.sessions)]
        table = policies.stored(sessions)
        for policy in policies.TWINS:
            found = policies.compare(policy, table, sessions, min(form.repeats, 3))
            ours, rule = found.ours.median, found.rule.median
            yield Line(f"linearize, {policy}, {shape}", ours, "ms", PLAIN, rule)


def against_copying(form: Form) -> Iterator[Line]:
    """Slime's rule, compared with plain Python, a trie and copying."""
    compact = roofline.compacted(form.size, form.rollouts)
    rows = tk.linearize(compact, "slime")
    for k in range(min(form.checked, form.rollouts)):
        roofline.check_rollout(rows, form.size, k)
    plain, trie = map(fastest, roofline.plain_times(form.size))
    for label, turns in roofline.forms(compact, rows):
        found = roofline.Against.copying(turns, rows, form.rollouts, form.repeats)
        times = [fastest(taken) for taken in found.times]
        for k, (taken, floor) in enumerate(zip(times, found.floors, strict=True), 1):
            what = f"linearize, slime, {label}, {('one thread', 'two threads')[k - 1]}"
            yield Line(what, taken, "ms", PLAIN, plain)
            yield Line(what, taken, "ms", "a trie over token ids", trie)
            yield Line(what, taken, "ms", "copying as many bytes", floor)
        one, two = times
        yield Line(
            f"linearize, slime, {label}, two threads",
            two,
            "ms",
            "trajkit, one thread",
            one,
        )


def recorded(form: Form) -> Iterator[Line]:
    """A call into the recorder."""
    mine, alone = stages.record(form.size, form.repeats)
    alternative = "comparing the prompts alone"
    yield Line("record, per turn", fastest(mine), "us", alternative, fastest(alone))


def changed(form: Form) -> Iterator[Line]:
    """From one form of turns to the other, and what they take."""
    _, times = scale.rates(form.size, form.repeats)
    copy = fastest(times.pop("copy the prompts"))
    for label, taken in times.items():
        yield Line(label, fastest(taken), "ms", "copying the prompts", copy)
    n_turns, context = form.size.n_turns, form.size.context
    forms = dict(scale.sizes(quoted("clean", n_turns, context)))
    text = forms.pop("JSON lines, full")
    for label, n_bytes in forms.items():
        yield Line(label, n_bytes, "bytes", "JSON lines, full", text)
    drifting = quoted("tail_changed", n_turns, context, 100)
    full, stored = scale.row_tokens(drifting)
    what = "rows of faithful, every reply drifts, in a file with dedup"
    yield Line(what, stored, "tokens", "in memory", full)


def imported(form: Form) -> Iterator[Line]:
    """JSON lines in."""
    wanted = [way for way in json_in.WAYS if way[0].startswith(("json.", "trajkit"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.jsonl"
        lines = json_in.log_lines(form.size, 1)
        path.write_bytes(b"\n".join([*lines, b""]))
        n_bytes = path.stat().st_size
        rates = {
            name: n_bytes / took
            for name, took in json_in.measured(path, min(form.repeats, 3), wanted)
            if isinstance(took, float)
        }
    plain = rates["json.loads, all lines held"]
    for name, rate in rates.items():
        if name.startswith("trajkit"):
            alternative = "json.loads into lists"
            yield Line(f"import, {name}", rate, "GB/s", alternative, plain, more=True)


def exported(form: Form) -> Iterator[Line]:
    """Rows out."""
    mine, plain = stages.export(form.size, form.repeats)
    alternative = "pyarrow, from lists"
    yield Line(
        "export to Parquet, per row", fastest(mine), "ms", alternative, fastest(plain)
    )


def streamed(form: Form) -> Iterator[Line]:
    """From file to file."""
    with tempfile.TemporaryDirectory() as folder:
        found = stream.measure(Path(folder), form.streamed, form.sampled)
    what = "Parquet to Parquet, trl"
    rates = (
        ("full prompts", found.ours_full, found.plain_full),
        ("delta form", found.ours_delta, found.plain_delta),
    )
    for label, ours, plain in rates:
        yield Line(f"{what}, {label}", ours, "M tokens/s", PLAIN, plain, more=True)
    alternative = f"{PLAIN}, full prompts"
    ours, plain = found.ours_delta, found.plain_full
    yield Line(f"{what}, delta form", ours, "M tokens/s", alternative, plain, more=True)
    what = "Arrow IPC to Arrow IPC, trl, delta form"
    ours = found.ours_streams
    yield Line(what, ours, "M tokens/s", alternative, plain, more=True)
    what = "Parquet to Parquet, trl"
    peak, first = found.run["peak"], found.run["first_half"]
    what = f"{what}, {form.streamed:,} rollouts, peak memory"
    yield Line(what, peak, "MiB", "in the first half", first)


def held(form: Form) -> Iterator[Line]:
    """The peak memory of each stage, above its inputs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory.written(folder, form.size, form.held)
        found = dict(memory.measured(folder))
    loads = found.pop("import, json.loads into lists").whole
    plain = found.pop("linearize, plain Python over lists").whole
    mine = found.pop("import, JSON lines").whole
    what = "memory, import, JSON lines"
    yield Line(what, mine, "MiB", "json.loads into lists", loads)
    for stage, one in found.items():
        # a page at least: what is held may be there already
        above = max(one.above, 4096)
        yield Line(f"memory, {stage}", above, "MiB", "its inputs", one.inputs)
        if stage.startswith("linearize"):
            what = f"memory, {stage}, with its inputs"
            yield Line(what, one.whole, "MiB", PLAIN, plain)


def grown(form: Form) -> Iterator[Line]:
    """A token, as rollouts become longer and more; and threads."""
    for shape, policy in (("clean", "slime"), ("tail_changed", "slime")):
        times = scale.growth(shape, policy, form.most_turns, form.repeats)
        least = min(times)
        for n_turns, taken in times.items():
            each = a_token(n_turns, taken) * 1e-9
            what = f"per token, {policy}, {shape}, {n_turns} turns"
            first = a_token(least, times[least]) * 1e-9
            yield Line(what, each, "ns", f"{least} turns", first)
    for shape in ("clean", "tail_changed"):
        sizes = scale.bytes_a_token(shape, form.most_turns)
        least = min(sizes)
        for n_turns, each in sizes.items():
            what = f"per 1,000 tokens, Arrow IPC, delta form, {shape}, {n_turns} turns"
            first = 1000 * sizes[least]
            yield Line(what, 1000 * each, "bytes", f"{least} turns", first)
    n_turns = form.size.n_turns
    size = quoted("clean", n_turns, TOKENS_PER_TURN * n_turns)
    times = scale.growth_with_sessions(size, form.most_sessions, form.repeats)
    least = min(times)
    for n, taken in times.items():
        each = a_token(size.n_turns, taken) * 1e-9
        first = a_token(size.n_turns, times[least]) * 1e-9
        yield Line(
            f"per token, slime, clean, {n} sessions",
            *(each, "ns", f"{least} of them", first),
        )
    one, two = scale.threads(size, form.threaded, form.repeats)
    what = f"per rollout of {form.threaded}, slime, delta form, two threads"
    yield Line(what, fastest(two), "ms", "one thread", fastest(one))


def kept(form: Form) -> Iterator[Line]:
    """What drift costs: tokens that are trained, and those that are computed."""
    policy = "faithful"
    for shape in ("tail_changed", "head_dropped"):
        context, table = drift.simulated(
            shape, form.size.n_turns, form.size.context, 100
        )
        found = {one["policy"]: one for one in table.to_pylist()}
        what = f"tokens trained, {policy}, {shape}"
        ours = found[policy]["tokens_trained"]
        for other in ("slime", "trl"):
            theirs = found[other]["tokens_trained"]
            yield Line(what, ours, "tokens", other, theirs, more=True)
        what = f"tokens computed, {policy}, shared once, {shape}"
        shared = found[policy]["tokens_forward_shared"]
        yield Line(what, shared, "tokens", "the last context", context)


def packs(form: Form) -> Iterator[Line]:
    """Rows to packs, and tries of tokens as trainers build them."""
    distinct, rows = (1e6 * rate for rate in pack.rates(form.packed, form.repeats))
    what = f"pack, {form.packed} mixed rollouts, distinct tokens"
    yield Line(what, distinct, "M tokens/s", "tokens of the rows", rows, more=True)
    own, others = pack.against_tries(form.tried, form.repeats)
    for name, taken in others:
        yield Line(f"pack, {form.tried} mixed rollouts", own, "ms", name, taken)


def kernel(form: Form) -> Iterator[Line]:
    """The prefix compare."""
    for n_tokens in (form.size.context, 16 * 2**20):
        ours, memcmp = kernel_rates(n_tokens, max(form.repeats, 5))
        what = f"prefix compare, {n_tokens:,} tokens"
        rates = median(ours) * 1e9, "GB/s", "memcmp", median(memcmp) * 1e9
        yield Line(what, *rates, more=True)


PARTS: dict[str, Callable[[Form], Iterator[Line]]] = {
    "linearize": linearized,
    "roofline": against_copying,
    "record": recorded,
    "forms": changed,
    "import": imported,
    "export": exported,
    "stream": streamed,
    "memory": held,
    "growth": grown,
    "drift": kept,
    "pack": packs,
    "kernel": kernel,
}


def main(words: list[str] | None = None, form: Form | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Print the table of all benchmarks, answers checked first.",
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, a minute")
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="a part of the table; may be repeated (all of them)",
    )
    choices = parser.parse_args(words)
    form = form or (QUICK if choices.quick else FULL)
    print(f"    command  python -m benchmarks {shlex.join(words or sys.argv[1:])}")
    print(f"    commit   {commit()}")
    print(f"    machine  {machine()}")
    print(
        f"    python   {platform.python_version()}, pyarrow {pa.__version__}, "
        f"numpy {np.__version__}"
    )
    print(
        f"    data     rollouts of {form.size.n_turns} turns and {form.size.context:,} "
        "tokens; times are per rollout unless stated otherwise"
    )
    print(f"\n{HEAD}", flush=True)
    start = time.monotonic()
    for part in choices.only or PARTS:
        for line in PARTS[part](form):
            print(line, flush=True)
    print(f"\n    taken    {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
