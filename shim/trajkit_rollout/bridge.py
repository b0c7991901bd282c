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
# an agent must not use up the descriptors of this process
_MAX_CONNECTIONS = 128


@contextmanager
def bridge(host: str, port: int) -> Iterator[int]:
    """Forward connections to an address while the ``with`` block runs.

    Yields the descriptor that `OPEN` gets. More than 128 connections at once are closed.
    """
    near, far = socket.socketpair()

    def serve() -> None:
        # a line that ends brings none
        for number in socket.recv_fds(near, 1, 1)[1]:
            asyncio.run(_forward(near, socket.socket(fileno=number), host, port))

    with near, far:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield far.fileno()
        finally:
            far.close()
            near.shutdown(socket.SHUT_RDWR)
            thread.join()


async def _forward(
    line: socket.socket, listener: socket.socket, host: str, port: int
) -> None:
    """Forward what comes to a listener until the line ends."""
    connections = set[asyncio.Task[None] | None]()

    async def connected(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        try:
            if len(connections) < _MAX_CONNECTIONS:
                connections.add(task)
                far_reader, far_writer = await asyncio.open_connection(host, port)
                both = (_copy(reader, far_writer), _copy(far_reader, writer))
                await asyncio.gather(*both)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, sock=listener)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_recv(line, 1)
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what one side sends until it ends; the other one may still answer."""
    try:
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
