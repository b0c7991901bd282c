"""Lets the commands of a network namespace reach one address outside of it.

A listener belongs to the namespace that it was opened in, whichever process accepts its
connections. So the namespace needs no running helper: `OPEN` opens a listener there,
passes it to this process and becomes the command.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PORT = 8765
"""Port of the listener, on the namespace's loopback address."""

OPEN = f"""\
import os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as line:
    with socket.create_server(("127.0.0.1", {PORT})) as listener:
        socket.send_fds(line, [b"."], [listener.fileno()])
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Python program for the namespace. Its arguments: a descriptor, and a command."""

_PIECE_BYTES = 1 << 16


@contextmanager
def bridge(host: str, port: int) -> Iterator[int]:
    """Forward connections to an address while the ``with`` block runs.

    Yields the descriptor that `OPEN` gets. All processes of the namespace must have ended
    at the end of the block.
    """
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_serve, args=(ours, host, port), daemon=True)
    thread.start()
    try:
        with theirs:
            yield theirs.fileno()
    finally:
        thread.join()


def _serve(line: socket.socket, host: str, port: int) -> None:
    with line:
        _, received, *_ = socket.recv_fds(line, 1, 1)
        # none if the command could not be started
        if received:
            listener = socket.socket(fileno=received[0])
            asyncio.run(_forward(listener, line, host, port))


async def _forward(
    listener: socket.socket, line: socket.socket, host: str, port: int
) -> None:
    async def connect(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writers = [writer]
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            writers.append(far_writer)
            pumps = [
                asyncio.create_task(_pump(reader, far_writer)),
                asyncio.create_task(_pump(far_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in writers:
            each.close()

    server = await asyncio.start_server(connect, sock=listener)
    # the end of the last process that has the other side of the line
    await asyncio.to_thread(line.recv, 1)
    server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
