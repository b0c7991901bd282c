"""The peers' own code beside trajkit, where their packages are installed.

    python -m benchmarks.installed_peers --python trl=VENV/bin/python

gives a peer's function the calls of seeded rollouts, in a process of the Python that is
named for it (this one, where none is), compares its rows with those of the policy of that
name, and prints both times. A peer that is not installed there, or can't be imported, is
named, and the others go on. Rows that differ are named with the first difference; such a
line has no ratio.

    pip install torch trl
    pip install torch transformers datasets peft loguru omegaconf accelerate aiohttp
    pip install requests ray==2.56.0 torchdata jaxtyping
    pip install --no-deps skyrl skyrl-gym   # the rest of what it names needs a GPU

SkyRL's configuration can't be imported under Python 3.11. Of the other peers no package is
known to hold the code that makes rows: what is timed for those is `benchmarks.policies`.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from benchmarks.compare import Timing, commit, machine, timed
from benchmarks.data import SHAPES, SIZES, Record, Size
from benchmarks.forks import FORKS
from benchmarks.in_peer import PEERS
from benchmarks.policies import calls, difference, stored

NAMES = ("prompt_ids", "output_ids", "output_logprobs")


def write_calls(sessions: list[list[Record]], path: Path) -> None:
    """What a peer needs of the calls, as JSON."""
    text = json.dumps([[{n: call[n] for n in NAMES} for call in s] for s in sessions])
    path.write_text(text)


def said_by(peer: str, python: str, folder: Path, repeats: int) -> dict[str, Any]:
    """What the peer's process says of the files of a folder.

    Its version and, by file, rows and seconds; or what is missing.
    """
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "rows.json"
        script = Path(__file__).with_name("in_peer.py")
        done = subprocess.run(
            # -P: the modules beside the script are not those that a peer asks for
            [python, "-P", str(script), peer, str(folder), str(target), str(repeats)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            return {"missing": f"it does not run: {''.join(last)}"}
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def differ(rows: pa.Table, sessions: list[list[Record]], theirs: Any) -> str | None:
    """The first difference between our rows and a peer's, or None.

    What the peer does not say of a row is not compared.
    """
    for session, expected in zip(sessions, theirs, strict=True):
        name = session[0]["session_id"]
        mine = rows.filter(pc.equal(rows["session_id"], name))
        lengths = mine["prompt_length"].to_pylist()
        said = [
            {"prompt_length": n, **row}
            for n, row in zip(lengths, expected, strict=False)
        ]
        found = difference(mine, [*said, *expected[len(said) :]])
        if found is not None:
            return f"{name}, {found}"
    return None


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.installed_peers",
        description="Time trajkit beside the peers' installed packages.",
    )
    parser.add_argument(
        "--python",
        metavar="PEER=PYTHON",
        action="append",
        default=[],
        help=f"where a peer is installed; a peer is one of {', '.join(PEERS)}",
    )
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--shape", choices=[*SHAPES, *FORKS], action="append")
    parser.add_argument("--sessions", type=int, default=1, help="of a shape (1)")
    parser.add_argument("--repeats", type=int, default=5, help="of each timing (5)")
    choices = parser.parse_args(words)
    pairs = [one.partition("=")[::2] for one in choices.python]
    for peer, _ in pairs:
        if peer not in PEERS:
            parser.error(f"{peer!r} is no peer: expected one of {', '.join(PEERS)}")
    choices.python = dict(pairs)
    return choices


def main(words: list[str] | None = None) -> None:
    choices = parse(words)
    size = SIZES[choices.size]
    text = shlex.join(words or sys.argv[1:])
    print(f"command  python -m benchmarks.installed_peers {text}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(
        f"data     {choices.sessions} sessions of {size.n_turns} turns and up to "
        f"{size.context} tokens; one thread; times of a session\n"
    )
    shapes = choices.shape or [*SHAPES, *FORKS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in shapes:
            write_calls(drawn(shape, size, choices.sessions), folder / f"{shape}.json")
        said = {
            peer: said_by(
                peer, choices.python.get(peer, sys.executable), folder, choices.repeats
            )
            for peer in PEERS
        }
    for peer, one in said.items():
        if "missing" in one:
            print(f"{peer}: not timed: {one['missing']}", flush=True)
    for shape in shapes:
        sessions = drawn(shape, size, choices.sessions)
        for peer, one in said.items():
            if "missing" not in one:
                text = beside(peer, sessions, one["found"][shape], choices.repeats)
                print(f"{shape:<14}{peer:<8}{one['version']:<10}{text}", flush=True)


def drawn(shape: str, size: Size, n: int) -> list[list[Record]]:
    """So many sessions of a shape, the same each time."""
    return [calls(shape, size, seed) for seed in range(n)]


def beside(
    policy: str, sessions: list[list[Record]], said: dict[str, Any], repeats: int
) -> str:
    """The rest of a line: whether the rows are equal, and what both took."""
    table = stored(sessions)
    rows = tk.linearize(table, policy)
    theirs = Timing(said["seconds"]).median
    found = differ(rows, sessions, said["rows"])
    if found is not None:
        return f"other rows: {found}; it takes {theirs * 1e3:.1f} ms"
    work = partial(tk.linearize, table, policy, threads=1)
    ours = timed(2 * repeats + 1, work, len(sessions)).median
    return (
        f"{rows.num_rows:>5} rows, equal {theirs * 1e3:>10.1f} ms, trajkit "
        f"{ours * 1e3:>8.2f} ms{theirs / ours:>8.1f} x"
    )


if __name__ == "__main__":
    main()
