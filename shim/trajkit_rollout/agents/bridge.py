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
    with near, far:
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve(near, host, port)), daemon=True
        )
        thread.start()
        try:
            yield far.fileno()
        finally:
            # the end of both lines ends the thread
            far.close()
            near.shutdown(socket.SHUT_RDWR)
            thread.join()


async def _serve(line: socket.socket, host: str, port: int) -> None:
    """Forward what comes to the listener that a line brings, until the line ends."""
    loop, connections = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(connections) < _MAX_CONNECTIONS:
            connections.add(task)
            task.add_done_callback(connections.discard)
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(host, port)
                both = (_copy(reader, far_writer), _copy(far_reader, writer))
                await asyncio.gather(*both)
        writer.close()

    arrived = asyncio.Event()
    loop.add_reader(line, arrived.set)
    server = None
    await arrived.wait()
    while received := socket.recv_fds(line, 1, 1)[1]:
        listener = socket.socket(fileno=received[0])
        server = await asyncio.start_server(forward, sock=listener)
        arrived.clear()
        await arrived.wait()
    loop.remove_reader(line)
    if server is not None:
        server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what one side sends until it ends; the other one may still answer."""
    try:
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
