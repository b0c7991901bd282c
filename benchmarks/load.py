"""Many sessions at once and many one after the other: what a gateway keeps and costs.

    python -m benchmarks.load --sessions 500 --turns 4

runs a gateway in a process of its own in front of an engine's server in another, has all
sessions converse at once over loopback, and compares the log with what the clients
received. It prints the processor time of the gateway's process per turn, which says how
many turns per second one process can serve. Then the same from one session that is alone.

    python -m benchmarks.load --sessions 20 50 1000 --engine-seconds 5 --characters 2500

has an engine that takes 5 seconds for a reply, so that all sessions wait at once, and
messages of 2,500 characters. The server speaks SGLang's protocol over HTTP, and samples
without a model.

    python -m benchmarks.load --finish 20000

opens 20,000 sessions, lets each make a turn, finishes it, and prints the gateway's
resident memory on the way.

All of them exit with 1 if a turn is lost, doubled or in the wrong session.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import commit, machine
from benchmarks.gateway import (
    Found,
    Host,
    Told,
    check_log,
    converse,
    finish_session,
    open_session,
)
from benchmarks.stream import MiB, resident

# sessions at a time that are opened and finished
_AT_ONCE = 32


async def _load(url: str, sessions: int, turns: int, length: int, told: Told) -> None:
    names = [f"t{k}" for k in range(sessions)]
    for name in names:
        await open_session(url, name, told)
    await asyncio.gather(
        *(converse(url, name, turns, told, length=length) for name in names)
    )


def _at_once(
    host: Host, directory: Path, sessions: int, turns: int, choices: argparse.Namespace
) -> list[str]:
    """Print what a gateway costs that serves these sessions; return what is wrong."""
    told = Told()
    engine = host.engine(choices.engine_seconds or 0.0)
    pid, url = host.start(directory, engine)
    # a first turn, for which the process reads what it needs
    asyncio.run(_finish(url, 0, 1, told))
    first, at_first, start = told.n_replies, processor_seconds(pid), time.perf_counter()
    asyncio.run(_load(url, sessions, turns, choices.characters, told))
    seconds = time.perf_counter() - start
    busy = (processor_seconds(pid) - at_first) / (told.n_replies - first)
    found = _ended(host, pid, directory, told)
    print(
        f"{sessions} sessions at once, {turns} turns each: {found.turns} turns in "
        f"{seconds:.1f} s, up to {told.most_at_once} calls at once, "
        f"{len(found.wrong)} things wrong"
    )
    print(
        f"  {'its process':<27}{busy * 1e3:10.2f} ms of a processor per turn: "
        f"{1 / busy:.0f} turns per second and core"
    )
    return found.wrong


async def _finish(url: str, first: int, last: int, told: Told) -> None:
    numbers = iter(range(first, last))

    async def one_after_the_other() -> None:
        for k in numbers:
            await open_session(url, f"s{k}", told)
            await converse(url, f"s{k}", 1, told)
            await finish_session(url, f"s{k}", 1.0, told)

    await asyncio.gather(*(one_after_the_other() for _ in range(_AT_ONCE)))


def _in_succession(host: Host, directory: Path, sessions: int) -> list[str]:
    """Print the memory of a gateway as sessions come and end; what is wrong."""
    told = Told()
    pid, url = host.start(directory, host.engine(0.0))
    done = 0
    for part in (0.05, 0.25, 0.5, 0.75, 1.0):
        goal = round(sessions * part)
        asyncio.run(_finish(url, done, goal, told))
        done = goal
        print(
            f"{done:>8} sessions finished{resident(pid=pid) / MiB:10.1f} MiB resident"
        )
    return _ended(host, pid, directory, told).wrong


def _ended(host: Host, pid: int, directory: Path, told: Told) -> Found:
    """End a gateway, and compare its log with what was acknowledged."""
    os.kill(pid, signal.SIGTERM)
    host.wait(pid)
    found = check_log(directory, told)
    if found.turns != told.n_replies:
        found.wrong.append(f"{found.turns} turns, and {told.n_replies} replies")
    return found


def processor_seconds(pid: int) -> float:
    """What a process has used of the processors (Linux)."""
    # the name in parentheses may contain spaces
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[500])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--engine-seconds", type=float, help="for a reply")
    parser.add_argument("--characters", type=int, default=0, help="of each message")
    parser.add_argument("--finish", type=int, help="sessions, one after the other")
    choices = parser.parse_args()
    print(f"{machine()}, commit {commit()}, load average {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory() as scratch, Host() as host:
        if choices.finish:
            wrong = _in_succession(host, Path(scratch), choices.finish)
        else:
            wrong = []
            sizes = [(sessions, choices.turns) for sessions in choices.sessions]
            if choices.engine_seconds is None:
                sizes.append((1, 50))
            for sessions, turns in sizes:
                folder = Path(scratch) / str(sessions)
                wrong += _at_once(host, folder, sessions, turns, choices)
    print(*wrong[:20], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
