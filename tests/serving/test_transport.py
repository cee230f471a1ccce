"""Connections: deadlines of whole requests, room for one more, and a port that is free at once."""

import contextlib
import http.client
import json
import select
import socket
import threading
import time

import pytest
from kvgate.serving import transport
from served import HI, ROUTE, Served, wait_for

HEAD = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def answer(connection):
    """All that the server sends until it closes."""
    with connection:
        return connection.makefile("rb").read()


def one(connection):
    """The status and the body of the next answer."""
    found = http.client.HTTPResponse(connection)
    found.begin()
    return found.status, found.read()


def drip(connection, data, seconds=0.1):
    """Send a byte at a time until the server has had enough."""
    with contextlib.suppress(OSError):
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(seconds)
            if select.select([connection], [], [], 0)[0]:
                return


def full(served):
    """As many connections as may be, by callers that then do nothing."""
    made = [served.connect() for _ in range(served.server.limit)]
    wait_for(lambda: len(served.server.connections) == served.server.limit)
    return made


@pytest.fixture
def small(bundle, monkeypatch):
    """A server with few spare connections."""
    monkeypatch.setattr("kvgate.serving.api.SPARE", 3)
    monkeypatch.setattr(transport, "_GRACE", 0.05)
    with Served(bundle) as made:
        made.server.limits = type("Long", (transport.Limits,), {})
        yield made


def test_a_restart_takes_the_port_that_connections_still_hold(bundle):
    with Served(bundle) as served:
        port = served.port
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b"200" in connection.makefile("rb").read()  # the server closes first: its side waits (TIME_WAIT)
    made = transport.Server(("127.0.0.1", port), None, 1, print)
    made.server_activate()
    made.server_close()


def test_a_port_is_had_before_anybody_can_connect():
    made = transport.Server(("127.0.0.1", 0), None, 1, print)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(made.server_address, timeout=10)
    other = transport.Server(made.server_address, None, 1, print)  # as a second one that also loads still
    made.server_activate()
    with pytest.raises(OSError, match="Address already in use"):
        other.server_activate()
    with pytest.raises(OSError, match="Address already in use"):
        transport.Server(made.server_address, None, 1, print)
    for server in (made, other):
        server.server_close()


def test_a_head_of_a_byte_at_a_time_ends_at_its_deadline(served):
    connection = served.connect()
    drip(connection, b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 100)
    assert b" 408 " in answer(connection)
    wait_for(lambda: not served.server.connections)


def test_a_body_of_a_byte_at_a_time_ends_at_its_deadline(served):
    for way in ("Content-Length: 999", "Transfer-Encoding: chunked"):
        connection = served.connect()
        connection.sendall(f"{HEAD}{way}\r\n\r\n".encode())
        drip(connection, b"3e7\r\n" + b" " * 99)
        data = answer(connection)
        assert b" 408 " in data and b"too slow" in data
    assert served.worker.length == 0


def test_a_slow_body_within_its_deadline_is_served(served):
    connection = served.connect()
    data = json.dumps({"messages": HI, "max_tokens": 1}).encode()
    connection.sendall(f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode())
    for part in (data[:9], data[9:20], data[20:]):
        time.sleep(0.1)
        connection.sendall(part)
    assert b" 200 " in answer(connection)


def test_a_client_that_says_nothing_is_let_go(served):
    connection = served.connect()
    assert answer(connection) == b""


def test_a_connection_that_is_kept_and_idle_is_let_go(served):
    served.server.limits = type("Short", (transport.Limits,), {"idle": 0.2})
    connection = served.connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    data = answer(connection)
    assert b" 200 " in data and b"Connection: close" not in data


def test_idle_connections_make_room_the_oldest_first(small):
    made = full(small)
    for connection in made:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert one(connection)[0] == 200
    wait_for(lambda: {x.state for x in small.server.connections} == {transport._IDLE})
    before = sorted(small.server.connections, key=lambda x: x.since)
    places = {x.getsockname(): x for x in made}
    oldest, newest = (places[x.socket.getpeername()] for x in (before[0], before[-1]))
    assert small.ask("GET", "/healthz")[0] == 200
    assert oldest.recv(1) == b"" and [x.dropped for x in before] == [True] + [False] * (len(before) - 1)
    newest.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert one(newest)[0] == 200
    for connection in made:
        connection.close()


def test_slow_clients_make_room(small):
    made = full(small)
    for n, connection in enumerate(made):  # in the head, in the body
        connection.sendall((HEAD + "Content-Length: 99\r\n\r\n{" if n % 2 else HEAD).encode())
    for _ in range(20):
        assert small.ask("GET", "/health")[0] == 200
        made.append(small.connect())
    assert small.ask(body={"messages": HI, "max_tokens": 1})[0] == 200
    for connection in made:
        connection.close()


def test_a_request_that_runs_or_waits_never_makes_room(small, rows):
    small.engine.go.clear()
    chats = []
    for n in range(3):
        chats.append(small.raw(max_tokens=12))
        wait_for(lambda n=n: small.worker.length == n + 1)
    others = [small.connect() for _ in range(30)]
    for _ in range(5):  # the queue and all connections are full
        assert small.ask("GET", "/healthz")[0] == 200
        assert small.ask(body={"messages": HI})[0] == 429
    small.engine.go.set()
    for connection in chats:
        assert json.loads(one(connection)[1])["choices"][0]["message"]["content"] == rows.trace["text"]
    for connection in chats + others:
        connection.close()


def test_of_many_at_once_each_is_answered_or_429(small, monkeypatch):
    monkeypatch.setattr(transport, "_GRACE", 20)  # nobody is slow here
    small.engine.seconds = 0.002
    found, lock = [], threading.Lock()

    def ask():
        status = small.ask(body={"messages": HI, "max_tokens": 2})[0]
        with lock:
            found.append(status)

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40 and set(found) <= {200, 429} and found.count(200) >= 3


def test_clients_that_do_not_read_make_room_when_their_answers_are_made(small, monkeypatch):
    monkeypatch.setattr("kvgate.serving.answers.chunk", lambda *_, **__: {"filled": "x" * 500_000})
    made = []
    for n in range(small.server.limit):
        made.append(small.raw(stream=True, max_tokens=9))
        wait_for(lambda n=n: sum(x.job is not None and x.job.ended is not None for x in small.server.connections) > n)
    first = set(small.server.connections)
    assert small.ask("GET", "/health")[0] == 200
    assert [x.dropped for x in first].count(True) == 1
    for connection in made:
        connection.close()


def test_a_mistake_of_ours_is_one_line_and_a_500(served, monkeypatch):
    monkeypatch.setattr(served.service, "metrics", lambda: 1 / 0)
    status, _, body = served.ask("GET", "/metrics")
    assert status == 500 and body["error"]["type"] == "server_error"
    wait_for(lambda: "serve: ZeroDivisionError: division by zero" in served.terminal.said)
