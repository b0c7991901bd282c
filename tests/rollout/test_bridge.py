"""The bridge of a sandbox's network outlives a shortage of descriptors and threads."""

import errno
import os
import socket
import socketserver
import threading
from contextlib import contextmanager

from trajkit_rollout import sandbox as bridges
from trajkit_rollout.sandbox import bridge


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)


@contextmanager
def bridged():
    """The port of a bridge to a server that sends back what it gets.

    This process opens the listener, as `_OPEN` does in a namespace.
    """
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with (
                bridge(*server.server_address) as given,
                socket.socket(fileno=os.dup(given)) as line,
                socket.create_server(("127.0.0.1", 0)) as listener,
            ):
                port = listener.getsockname()[1]
                socket.send_fds(line, [b"."], [listener.fileno()])
                yield port
        finally:
            server.shutdown()
            serving.join()


def client(port):
    return socket.create_connection(("127.0.0.1", port), 20)


def answered(line):
    """Whether a connection is forwarded; otherwise it is closed."""
    try:
        line.sendall(b"hello")
        return line.recv(100) == b"hello"
    except ConnectionError:
        return False


def test_a_connection_waits_for_a_free_descriptor(monkeypatch):
    faults = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def fail_once(listener):
        if faults:
            raise faults.pop()
        return accept(listener)

    with bridged() as port:
        monkeypatch.setattr(socket.socket, "accept", fail_once)
        with client(port) as line:
            assert answered(line)


def test_connections_beyond_the_limit_are_closed(monkeypatch):
    monkeypatch.setattr(bridges, "_MAX_CONNECTIONS", 2)
    with bridged() as port, client(port) as first:
        with client(port) as second, client(port) as third:
            assert [answered(each) for each in (first, second, third)] == [
                True,
                True,
                False,
            ]
        # the second one's thread ends soon
        found = False
        while not found:
            with client(port) as later:
                found = answered(later)
        assert answered(first)
