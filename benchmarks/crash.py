"""What a gateway that is killed leaves behind.

    python -m benchmarks.crash --kills 100 --seed 0

kills a gateway under load so often, each time at another moment, and compares its log
with what its clients were told: every acknowledged turn is there, once and whole, under
its own session, and so is every session that was opened or finished. It exits with 1
where anything is wrong.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.gateway import (
    Host,
    Told,
    check_log,
    converse,
    finish_session,
    open_session,
)

# sessions at a time, and conversations that each has at once
_SESSIONS, _AT_ONCE = 6, 2
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
    # files that ended within an entry
    torn: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills: {self.acknowledged} acknowledged turns of "
            f"{self.sessions} sessions ({self.finished} finished), {self.logged} turns "
            f"in the logs, {self.torn} files torn, {len(self.wrong)} things wrong"
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
        for k in range(kills):
            # each kill's moment is its own, whatever came before
            draw = random.Random(f"{seed} {k}")
            log = directory / f"{k:04d}"
            told = Told()
            options = {
                "max_file_turns": draw.choice([3, 10, 1000]),
                "fsync": draw.random() < 0.25,
                "form": draw.choice(["full", "delta"]),
            }
            pid, url = host.start(log, **options)
            asyncio.run(_load_and_kill(url, pid, told, draw))
            host.wait(pid)
            found = check_log(log, told)
            outcome.kills += 1
            outcome.acknowledged += told.n_replies
            outcome.logged += found.turns
            outcome.sessions += len(told.replies)
            outcome.finished += len(told.finished)
            outcome.torn += found.torn
            outcome.wrong += [f"kill {k}: {each}" for each in found.wrong]
            yield outcome


async def _load_and_kill(url: str, pid: int, told: Told, draw: random.Random) -> None:
    """Load a gateway without a pause, and kill it at some moment.

    That is after some replies, and up to 20 ms on: anywhere in the work on a call.
    """
    after, then = draw.randrange(60), draw.random() * 0.02
    numbers = count()

    async def loaded() -> None:
        while True:
            session = f"s{next(numbers)}"
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
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as directory:
        for outcome in run(arguments.kills, arguments.seed, Path(directory)):
            print(outcome, flush=True)
    print(*outcome.wrong, sep="\n")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
