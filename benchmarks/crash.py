"""What a gateway that is killed leaves behind, and how a run continues.

    python -m benchmarks.crash --kills 100 --seed 0

kills a gateway under load as often as asked, each time at another moment. After each kill
the next gateway of the run writes a log of its own, and samples again what was not
finished, under new names. The logs of the run are compared with what the clients
received: every acknowledged turn is there, once and complete, under its own session, and
so is every session that was opened or finished. Their rows verify. It exits with 1 where
anything is wrong.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

import trajkit as tk
from benchmarks.compare import commit, machine
from benchmarks.gateway import (
    Host,
    Told,
    check_log,
    converse,
    finish_session,
    open_session,
)
from trajkit.errors import TornLogWarning

# sessions at a time, and conversations that each has at once
_SESSIONS, _AT_ONCE = 6, 2
# gateways that one run loses
_KILLS_PER_RUN = 5
# what a client is told when its gateway dies
_BROKEN = (OSError, EOFError)


@dataclass
class Outcome:
    """Of all kills."""

    kills: int = 0
    # acknowledged turns, and turns in the logs
    acknowledged: int = 0
    logged: int = 0
    sessions: int = 0
    finished: int = 0
    # sessions that were not finished and were sampled again by the next gateway
    resumed: int = 0
    # files that ended within an entry
    torn: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills: {self.acknowledged} acknowledged turns of "
            f"{self.sessions} sessions ({self.finished} finished, {self.resumed} "
            f"sampled again), {self.logged} turns in the logs, {self.torn} files torn, "
            f"{len(self.wrong)} things wrong"
        )


def run(kills: int, seed: int, directory: Path) -> Iterator[Outcome]:
    """Kill so many gateways; what was found so far, after each.

    Parameters
    ----------
    kills, seed : int
    directory : Path
        Gets a log per kill.
    """
    outcome = Outcome()
    with Host() as host:
        for first in range(0, kills, _KILLS_PER_RUN):
            told, torn = Told(), 0
            folder = directory / f"{first:04d}"
            form = random.Random(f"{seed} {first} form").choice(["full", "delta"])
            for k in range(first, min(first + _KILLS_PER_RUN, kills)):
                # each kill's moment is its own, whatever came before
                draw = random.Random(f"{seed} {k}")
                options = {"fsync": draw.random() < 0.25, "form": form}
                left = [name for name in told.replies if name not in told.finished]
                again = [f"{name}~" for name in left if f"{name}~" not in told.replies]
                before = told.n_replies
                pid, url = host.start(folder / str(k), **options)
                asyncio.run(_load_and_kill(url, pid, told, draw, again, f"s{k}"))
                host.wait(pid)
                outcome.kills += 1
                outcome.acknowledged += told.n_replies - before
                outcome.resumed += sum(name in told.replies for name in again)
                found = check_log(folder, told)
                wrong = found.wrong + _rows_that_do_not_verify(folder)
                outcome.wrong += [f"kill {k}: {each}" for each in wrong]
                outcome.torn, torn = outcome.torn + found.torn - torn, found.torn
                yield outcome
            outcome.logged += found.turns
            outcome.sessions += len(told.replies)
            outcome.finished += len(told.finished)
            yield outcome


def _rows_that_do_not_verify(folder: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLogWarning)
        turns = tk.read_turns(folder)
    found = tk.verify(tk.linearize(turns, "faithful", reward=1.0), turns)
    return [str(each) for each in found.to_pylist()]


async def _load_and_kill(
    url: str,
    pid: int,
    told: Told,
    draw: random.Random,
    again: Iterable[str],
    prefix: str,
) -> None:
    """Load a gateway without a pause, and kill it at some moment.

    That is after some replies, and up to 20 ms on: anywhere in the work on a call.
    ``again``: names of its first sessions; the others begin with ``prefix``.
    """
    after, then = told.n_replies + draw.randrange(60), draw.random() * 0.02
    names = chain(again, (f"{prefix}-{n}" for n in count()))

    async def loaded() -> None:
        for session in names:
            await open_session(url, session, told)
            # side by side in one session, each a conversation of its own
            ends = await asyncio.gather(
                *(
                    converse(url, session, draw.randrange(1, 6), told, first=1000 * k)
                    for k in range(_AT_ONCE)
                ),
                return_exceptions=True,
            )
            for end in ends:
                if end is not None:
                    raise end
            if draw.random() < 0.5:
                await finish_session(url, session, draw.random(), told)

    async def kill() -> None:
        while told.n_replies < after:
            await asyncio.sleep(0.001)
        await asyncio.sleep(then)
        os.kill(pid, signal.SIGKILL)

    async def until_broken() -> None:
        try:
            await loaded()
        except _BROKEN:
            return

    await asyncio.gather(kill(), *(until_broken() for _ in range(_SESSIONS)))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{machine()}, commit {commit()}, load average {os.getloadavg()[0]:.1f}\n")
    outcome, start = Outcome(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        for outcome in run(arguments.kills, arguments.seed, Path(directory)):
            sys.stdout.write(f"\r{outcome}")
            sys.stdout.flush()
    print(f"\n{time.perf_counter() - start:.0f} s")
    print(*outcome.wrong[:20], sep="\n")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
