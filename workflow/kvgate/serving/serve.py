"""Serve a bundle over HTTP as OpenAI's API: chat and completions under /v1, and /health, /metrics, /tokenize.

One model: requests are answered one at a time, in order; a few wait, the rest are sent away with 429.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvgate.serving import access, arguments, bundled
from kvgate.serving.api import ApiServer
from kvgate.serving.service import Service
from kvgate.serving.terminal import Terminal
from kvgate.serving.worker import Worker

_END = 5.0  # seconds that the running answer has to stop at the end


def parser(folder: Path) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="serve.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    made.add_argument(
        "--port", type=bundled.number(int, 0, 65535), default=8000, help="0: any free one (default: 8000)"
    )
    made.add_argument(
        "--queue", type=bundled.number(int, 0, 1000), default=8, help="requests that may wait (default: 8)"
    )
    made.add_argument("--quiet", action="store_true", help="no line for each request")
    made.add_argument(
        "--alias", action="append", default=[], metavar="NAME", help="a model name that is taken too; repeatable"
    )
    made.add_argument(
        "--api-key-file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="keys, one a line: who asks needs one of them; repeatable",
    )
    made.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="such a key; others of this machine can see it in the list of processes",
    )
    made.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's http://HOST:PORT that may ask; *: all; repeatable",
    )
    made.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of this machine beside localhost, as a proxy sends it; repeatable",
    )
    arguments.sampling(made)
    bundled.options(made, folder)
    made.epilog = """\
--max-tokens to --seed hold where a request says nothing.
Without a key, who can reach the port can use the model."""
    return made


def main(argv: list[str], folder: Path) -> int:
    with bundled.ends_at_once():
        args = parser(folder).parse_args(argv)
        terminal, worker = Terminal(args.show_runtime), None
    try:
        keys = access.keys(args.api_key, args.api_key_file)
        origins = tuple(access.origin(x) for x in args.allow_origin)
        rules = access.Access(tuple(x.lower() for x in args.allow_host), origins, keys)
        with bundled.ends_at_once():
            bundle = bundled.Bundle(args.bundle)
            worker = Worker(lambda: bundled.open_context(args, bundle, terminal), args.queue)
            service = Service(bundle, bundle.text(), worker, args.alias, arguments.chosen(args))
            address = args.host, args.port
            with _said_of(address):  # before the model is loaded, which may take a minute
                server = ApiServer(address, service, rules, terminal.say, not args.quiet)
            worker.start()
            with _said_of(address):
                server.server_activate()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _serve(server)
        return 0
    except KeyboardInterrupt:
        return 0
    except BaseException as error:  # of a vendor's package, too: one line on the user's stderr, which is not fd 2 here
        terminal.say("serve: {}".format(bundled.one_line(error)))
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        if worker is not None:
            worker.stop(0 if worker.stopping.is_set() else _END)


@contextlib.contextmanager
def _said_of(address: tuple[str, int]) -> Iterator[None]:
    """Raises Refused where the address cannot be had."""
    try:
        yield
    except OSError as error:
        raise bundled.Refused("{}:{}: {}".format(*address, error.strerror or error)) from None


def _serve(server: ApiServer) -> None:
    """Until ctrl-C or SIGTERM; then the running answer ends early."""
    service, say = server.service, server.say
    host = "[{}]".format(server.server_name) if ":" in server.server_name else server.server_name
    say(
        "serving {} on http://{}:{}/v1 (context {} tokens); ctrl-C ends it".format(
            service.names[0], host, server.server_port, service.capacity
        )
    )
    if not access.loopback(server.server_name) and not server.access.keys:
        say("other machines reach this address, and there is no key: --api-key-file FILE")
    # In a thread of its own: the exception of a signal would cut off a connection that was just taken.
    accepts = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    accepts.start()
    try:
        accepts.join()
    except KeyboardInterrupt:
        say("stopping")
    server.shutdown()
    server.socket.close()
    end = time.monotonic() + _END
    if service.worker.stop(_END):  # else a step hangs
        while server.answering() and time.monotonic() < end:
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path()))
