"""What long messages of one client cost the others: ``python -m benchmarks.stall``.

One client sends messages of 1 or 4 MB, one after the other. Meanwhile another one asks for
``/healthz`` and makes short calls; its times with and without the first one are printed.
"""

import asyncio
import multiprocessing
import tempfile
import time
from contextlib import closing, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

import trajkit
from benchmarks.gateway import Host, Line

SECONDS = 10.0
MESSAGE_BYTES = (1_000_000, 4_000_000)


def ordinary_code(n_bytes: int) -> str:
    """The source of this package, as often as it takes."""
    paths = sorted(Path(trajkit.__file__).parent.rglob("*.py"))
    text = "\n".join(path.read_text() for path in paths)
    return (text * (n_bytes // len(text) + 1))[:n_bytes]


async def short_calls(url: str, key: str) -> dict[str, np.ndarray]:
    """The seconds of each request, by what was asked."""
    taken: dict[str, list[float]] = {"healthz": [], "turn": []}
    until = time.perf_counter() + SECONDS

    async def measure(name: str, path: str, body: object) -> None:
        with closing(Line(url)) as line:
            while time.perf_counter() < until:
                start = time.perf_counter()
                await line.ask(path, body, key)
                taken[name].append(time.perf_counter() - start)

    say = {"messages": [{"role": "user", "content": "mine 0"}]}
    await asyncio.gather(
        measure("healthz", "/healthz", None),
        measure("turn", "/v1/chat/completions", say),
    )
    return {name: np.array(values) for name, values in taken.items()}


def long_calls(url: str, key: str, n_bytes: int, ready: Event) -> None:
    """Send long messages until this process is ended."""
    code = ordinary_code(n_bytes)

    async def send() -> None:
        with closing(Line(url)) as line:
            for number in range(10**6):
                # each is new to the gateway
                content = f"{number}\n{code}"
                say = {"messages": [{"role": "user", "content": content}]}
                # a message that is too long for the model is an error
                with suppress(RuntimeError):
                    await line.ask("/v1/chat/completions", say, key)
                ready.set()

    asyncio.run(send())


async def open_session(url: str) -> str:
    """The key of a new session."""
    with closing(Line(url)) as line:
        return str((await line.ask("/sessions", {}))["api_key"])


def main() -> None:
    """Measure and print."""
    with Host() as host, tempfile.TemporaryDirectory() as folder:
        _, url = host.start(Path(folder) / "run")
        mine, other = (asyncio.run(open_session(url)) for _ in range(2))
        # the first calls load what the others find
        asyncio.run(short_calls(url, mine))
        show("alone", asyncio.run(short_calls(url, mine)))
        context = multiprocessing.get_context("spawn")
        for n_bytes in MESSAGE_BYTES:
            ready = context.Event()
            arguments = (url, other, n_bytes, ready)
            sender = context.Process(target=long_calls, args=arguments)
            sender.start()
            try:
                ready.wait()
                taken = asyncio.run(short_calls(url, mine))
            finally:
                sender.kill()
                sender.join()
            show(f"with messages of {n_bytes:,} bytes", taken)


def show(when: str, taken: dict[str, np.ndarray]) -> None:
    """Print a line per kind of request."""
    for name, seconds in taken.items():
        median, late, worst = 1e3 * np.percentile(seconds, [50, 99, 100])
        print(
            f"{name:<8} {when:<32} {len(seconds):6} calls, median {median:6.1f} ms, "
            f"99th percentile {late:6.1f} ms, longest {worst:6.1f} ms"
        )


if __name__ == "__main__":
    main()
