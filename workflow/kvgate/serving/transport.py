"""Connections with deadlines, and a server that always has room for one more. Standard library only, Python 3.9.

A thread belongs to each connection, so their number is limited. Where it is reached, those that wait for a request or
are slow make room; one whose request is generated never does. Thus /health is answered whatever others do.
"""

from __future__ import annotations

import contextlib
import io
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from kvgate.serving.worker import Job

SPARE = 48  # connections beyond those whose requests run or wait
_GRACE = 1.0  # seconds that a connection has for what it does before it may be the one that makes room
_CLOSING, _IDLE, _READING, _ANSWERING = range(4)  # what a connection does; the first makes room first


class Limits:
    """Seconds that a client has: for the next request, for the whole of its head, of its body, and to take a piece."""

    idle, head, body, write = 30.0, 10.0, 30.0, 30.0


class Connection(io.RawIOBase):
    """A socket whose reads end at a deadline for all of them together: a byte a second does not move it.

    Raises socket.timeout (TimeoutError) where time is over.
    """

    def __init__(self, made: socket.socket, limits: type[Limits]) -> None:
        super().__init__()
        self.socket, self.limits = made, limits
        self.dropped = False  # to make room
        self.heard = False  # a byte of the request that is read now
        self._does(_READING, limits.head)  # a new one has something to say

    def _does(self, state: int, seconds: float) -> None:
        self.job: Job | None = None
        self.state, self.since = state, time.monotonic()
        self._end = self.since + seconds

    def next_request(self) -> None:
        """It may be idle until the first byte of the next one."""
        self.heard = False
        self._does(_IDLE, self.limits.idle)

    def reads_body(self) -> None:
        self._does(_READING, self.limits.body)

    def answers(self) -> None:
        self._does(_ANSWERING, 0)

    def works(self, job: Job) -> None:
        """Its request runs or waits until the job has ended."""
        self._does(_ANSWERING, 0)
        self.job = job

    def closes(self, seconds: float) -> None:
        """Only what the client still sends is read."""
        self._does(_CLOSING, seconds)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise socket.timeout("the client is too slow")
        self.socket.settimeout(left)
        count = self.socket.recv_into(buffer)
        if self.state == _IDLE and count:
            self._does(_READING, self.limits.head)
        self.heard = self.heard or bool(count)
        return count

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.socket.settimeout(self.limits.write)  # of the whole of `data`
        self.socket.sendall(data)
        return len(data)

    def hung_up(self) -> bool:
        """Whether the client has closed its side. What it sends early stays where it is."""
        try:
            if not select.select([self.socket], [], [], 0)[0]:
                return False
            return not self.socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def may_go(self) -> bool:
        """Whether it can be the one that makes room. A request that runs or waits holds it; what is left of the answer
        then has to be taken like anything else."""
        job = self.job  # its own thread may change it now
        since = self.since if job is None else job.ended
        if self.dropped or since is None:
            return False
        return self.state <= _IDLE or time.monotonic() - since > _GRACE

    def drop(self) -> None:
        """From another thread: what the connection's own thread waits for ends."""
        self.dropped = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def shutdown(self, how: int) -> None:
        self.socket.shutdown(how)

    def close(self) -> None:
        super().close()
        self.socket.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that the system keeps while there is no room

    def __init__(self, address: tuple[str, int], handler: Any, limit: int, say: Callable[[str], None]) -> None:
        """The address is taken; `server_activate` begins to listen. limit: connections at a time.

        Raises OSError where the address cannot be bound.
        """
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.limit, self.say = limit, say
        self.limits = Limits
        self.connections: set[Connection] = set()
        self._changed = threading.Condition()
        super().__init__(address, handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service, which may take its time on a board without a network.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended hold the port else
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[Any, Any]:
        made, address = super().get_request()
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token is a packet
        return Connection(made, self.limits), address

    def process_request(self, request: Any, client_address: Any) -> None:
        self._make_room()
        with self._changed:
            self.connections.add(request)
        super().process_request(request, client_address)

    def _make_room(self) -> None:
        """Returns when one more connection may be. There are more places than requests may run and wait: it ends."""
        with self._changed:
            while len(self.connections) >= self.limit:
                found = [x for x in self.connections if x.may_go()]
                if found:
                    min(found, key=lambda x: (x.state, x.since)).drop()
                self._changed.wait(0.05)

    def answering(self) -> int:
        """Connections whose request is not answered yet."""
        with self._changed:
            return sum(x.state == _ANSWERING for x in self.connections)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self.connections.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error; a mistake of ours is one line, not a trace."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.say("serve: {}: {}".format(type(error).__name__, error))
