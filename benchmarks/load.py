"""Many sessions side by side: is every turn there once, and what does the gateway cost?

    python -m benchmarks.load --sessions 500 --turns 4

runs a gateway on the embedded engine in a process of its own, has all sessions converse
at once over loopback, and compares the log with what the clients got. It prints the
gateway's own time per turn beside the engine's: what passed from the request's arrival
to its answer's last byte, the engine aside, which under load is mostly waiting for
other calls; and the processor time of the gateway's own steps, which is not. Then the
same from one session that is alone. It exits with 1 where a turn is lost, doubled or
crossed.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks.compare import commit, machine
from benchmarks.gateway import (
    Found,
    Host,
    Line,
    Told,
    check_log,
    converse,
    open_session,
)

Times = dict[str, dict[str, float]]


def run(
    sessions: int, turns: int, directory: Path, host: Host
) -> tuple[Found, Told, Times, float]:
    """Load a gateway; what its log holds, what clients got, times, and seconds in all."""
    pid, url = host.start(directory)
    told = Told()
    start = time.perf_counter()
    times = asyncio.run(_load(url, sessions, turns, told))
    seconds = time.perf_counter() - start
    os.kill(pid, signal.SIGTERM)
    host.wait(pid)
    return check_log(directory, told), told, times, seconds


async def _load(url: str, sessions: int, turns: int, told: Told) -> Times:
    names = [f"s{k}" for k in range(sessions)]
    for name in names:
        await open_session(url, name, told)
    await asyncio.gather(*(converse(url, name, turns, told) for name in names))
    with closing(Line(url)) as line:
        times: Times = await line.ask("/admin/timings")
    return times


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    print(f"{machine()}, commit {commit()}\n")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, Host() as host:
        for sessions in (arguments.sessions, 1):
            turns = arguments.turns if sessions > 1 else 50
            found, told, times, seconds = run(
                sessions, turns, Path(scratch) / str(sessions), host
            )
            wrong += found.wrong
            if (found.turns, told.n_replies) != (sessions * turns,) * 2:
                wrong.append(
                    f"{found.turns} turns in the log, {told.n_replies} replies"
                )
            print(
                f"{sessions} sessions side by side, {turns} turns each: {found.turns} "
                f"turns in {seconds:.1f} s, {len(found.wrong)} things wrong"
            )
            for name, what in (
                ("gateway_ms", "gateway, waiting included"),
                ("busy_ms", "gateway, processor time"),
                ("engine_ms", "engine"),
            ):
                each = times[name]
                print(
                    f"  {what:<27}{each['median']:10.2f} ms median"
                    f"{each['p99']:10.2f} ms 99th percentile"
                )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
