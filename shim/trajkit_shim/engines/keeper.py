"""Runs a server until standard input ends, then ends it with every process it started.

`engines.launch` runs this file, with the standard library only, as ``keeper.py SECONDS
COMMAND...``: standard input ends however the gateway ends, and the server then has SECONDS
to end after SIGTERM. A terminal or a service manager signals every process, but the gateway
first answers its calls, so signals to this program have no effect.

The program is two processes. If the keeper is killed, the guard ends the server; if the
guard is killed, the gateway ends standard input; if both are, the kernel ends the server's
first process (PR_SET_PDEATHSIG of prctl(2)). Linux only: orphaned processes of the server
become children of the keeper, else of the guard (PR_SET_CHILD_SUBREAPER).
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PDEATHSIG, _SUBREAPER = 1, 36


def keep(command: Sequence[str], stop_seconds: float) -> int:
    """Run a server until standard input ends; return its exit code as a shell does."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        # unlike SIG_IGN, the server does not inherit it
        signal.signal(number, lambda *_: None)
    if child := os.fork():
        # this is the guard
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _end_children()
        return code if code >= 0 else 128 - code
    libc.prctl(_SUBREAPER, 1)
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        # as a shell reports it
        return 127
    ended = os.pidfd_open(server.pid)
    if ended not in select.select([0, ended], [], [])[0]:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(stop_seconds)
        server.kill()
    code = server.wait()
    _end_children()
    return code if code >= 0 else 128 - code


def _end_children() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    # the children of one that ends are in the next list
    while pids := children.read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        os.waitpid(-1, 0)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], float(sys.argv[1])))
