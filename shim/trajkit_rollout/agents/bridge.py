"""Lets the commands of a network namespace reach one address outside of it.

A listener belongs to the namespace that it was opened in, whichever process accepts its
connections. So the namespace needs no running helper: `OPEN` opens a listener there,
passes it to this process and becomes the command.
"""

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

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
# an agent must not use up the descriptors and threads of this process
_MAX_CONNECTIONS = 128
_PAUSE_SECONDS = 0.1


@contextmanager
def bridge(host: str, port: int) -> Iterator[int]:
    """Forward connections to an address while the ``with`` block runs.

    Yields the descriptor that `OPEN` gets. More than 128 connections at once are closed.
    All processes of the namespace must have ended at the end of the block.
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
        if not received:
            return
        forwards: list[threading.Thread] = []
        with socket.socket(fileno=received[0]) as listener:
            # until the last process that has the other side of the line has ended
            while line not in _readable(line, listener):
                forwards = [each for each in forwards if each.is_alive()]
                try:
                    with ExitStack() as stack:
                        near = stack.enter_context(listener.accept()[0])
                        if len(forwards) < _MAX_CONNECTIONS:
                            thread = threading.Thread(
                                target=_forward, args=(near, host, port), daemon=True
                            )
                            thread.start()
                            stack.pop_all()
                            forwards.append(thread)
                except (OSError, RuntimeError):
                    # there are no descriptors or threads, until others are released
                    _readable(line, timeout_s=_PAUSE_SECONDS)


def _forward(near: socket.socket, host: str, port: int) -> None:
    """Copy what both sides send until one of them ends."""
    with near, suppress(OSError), socket.create_connection((host, port)) as far:
        while True:
            ready = _readable(near, far)
            for source, target in ((near, far), (far, near)):
                if source in ready:
                    data = source.recv(_PIECE_BYTES)
                    if not data:
                        return
                    target.sendall(data)


def _readable(*sockets: socket.socket, timeout_s: float | None = None) -> list[object]:
    """Wait until some of the sockets can be read, and return these."""
    # unlike the default one, this selector needs no descriptor
    with selectors.PollSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]
