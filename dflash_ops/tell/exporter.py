"""The exporter: what was last seen of the jobs, for Prometheus, over HTTP or as a file.

The rules here: a scrape reads what is there and asks nobody, so that it never hangs and starts nothing on a job's
machine; a job that could not be asked, or not for too long, says `dflash_up 0` and nothing else.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dflash_ops import __version__
from dflash_ops.errors import DflashError, UsageError
from dflash_ops.tell import file
from dflash_ops.tell.metrics import METRICS, OWN, Told, clean, samples

#: Metrics of the exporter and of its looks: name -> (kind, labels, what it says).
ITSELF: dict[str, tuple[str, tuple[str, ...], str]] = {
    "dflash_up": ("gauge", OWN, "1 if the newest look was answered and is not too old; else 0, and nothing else of it"),
    "dflash_look_seconds": ("gauge", OWN, "how long the newest look took"),
    "dflash_look_age_seconds": ("gauge", OWN, "seconds since the newest look was over"),
    "dflash_exporter_info": ("gauge", ("version",), "1, with the version of dflash-ops"),
    "dflash_exporter_jobs": ("gauge", (), "jobs and nodes that are looked at"),
    "dflash_exporter_pass_seconds": ("gauge", (), "the slowest of the newest looks; they are made side by side"),
    "dflash_exporter_last_look_timestamp_seconds": ("gauge", (), "when the last look was over, since the epoch"),
    "dflash_exporter_looks": ("counter", ("result",), "looks: ok, unreachable, error"),
    "dflash_exporter_errors": ("counter", ("type",), "looks that failed, by the class of the error (docs/hosts.md)"),
}

#: Seconds that a client may take over its request, and clients that are served at one time.
_CLIENT_S = 10.0
_CLIENTS = 32


@dataclass(frozen=True)
class _Known:
    told: Told
    over: float


class Board:
    """What was last seen, written by the pass and read by scrapes.

    Args:
        jobs: how many are looked at. stale_s: seconds after which a look is too old to be told.
        clock: seconds, never backwards. wall: seconds since the epoch.
    """

    def __init__(
        self,
        jobs: int,
        stale_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._jobs, self._stale_s, self._clock, self._wall = jobs, stale_s, clock, wall
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._results: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._last: float | None = None

    def put(self, index: int, told: Told, error: DflashError | None = None) -> None:
        """The newest look at one of them; `error`: why it could not be asked, or what it answered with."""
        unreachable = error is not None and error.exit_code == 5
        with self._lock:
            self._known[index] = _Known(told, self._clock())
            self._results["ok" if error is None else "unreachable" if unreachable else "error"] += 1
            if error is not None:
                self._errors[type(error).__name__] += 1
            self._last = self._wall()

    def fault(self, error: DflashError) -> None:
        """Something beside a look failed."""
        with self._lock:
            self._errors[type(error).__name__] += 1

    def collect(self) -> Iterator[Any]:
        """All families, for prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            now = self._clock()
            known = [replace(k.told, age_s=now - k.over) for _, k in sorted(self._known.items())]
            results, errors, last = Counter(self._results), Counter(self._errors), self._last
        made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        fresh = [t for t in known if t.snapshot is not None and t.age_s <= self._stale_s]
        up = {id(t) for t in fresh}

        def own(t: Told) -> tuple[str, ...]:
            return (clean(t.job), clean(t.host), clean(t.node))

        values: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "dflash_up": [(own(t), float(id(t) in up)) for t in known],
            "dflash_look_seconds": [(own(t), t.look_s) for t in known],
            "dflash_look_age_seconds": [(own(t), t.age_s) for t in known],
            "dflash_exporter_info": [((__version__,), 1.0)],
            "dflash_exporter_jobs": [((), float(self._jobs))],
            "dflash_exporter_pass_seconds": [((), max((t.look_s for t in known), default=0.0))] if known else [],
            "dflash_exporter_last_look_timestamp_seconds": [((), last)] if last is not None else [],
            "dflash_exporter_looks": [((r,), float(results[r])) for r in ("ok", "unreachable", "error")],
            "dflash_exporter_errors": [((name,), float(count)) for name, count in sorted(errors.items())],
        }
        for name, (kind, labels, text) in ITSELF.items():
            family = made[kind](name, text, labels=labels)
            for label_values, value in values[name]:
                family.add_metric(label_values, value)
            yield family
        for metric in METRICS:
            family = made[metric.kind](metric.name, metric.help, labels=(*OWN, *metric.labels))
            for told in fresh:
                for label_values, value in samples(metric, told):
                    family.add_metric(label_values, value)
            yield family

    def text(self) -> bytes:
        """As Prometheus reads it."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Any]:
        return []  # else registering would collect once


def needed() -> None:
    """Raises DflashError where prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise DflashError(
            "the exporter needs the package prometheus-client, which is not installed",
            "this machine",
            "pip install 'dflash-ops[exporter]'",
        ) from None


def address(text: str) -> tuple[str, int]:
    """`127.0.0.1:9400`, `:9400` (all addresses), `9400` (this machine only), `[::1]:9400`.

    Raises:
        UsageError: it is none of these.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host = "127.0.0.1"
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (port.isascii() and port.isdigit()) or int(port) > 65535 or (":" in bare and bare == host):
        raise UsageError(
            f"{text!r} is no address to listen at", "--listen", "give HOST:PORT, as 127.0.0.1:9400 or [::1]:9400"
        )
    return bare, int(port)


class Server:
    """HTTP in threads of its own, from now on; `url` says where.

    Raises:
        DflashError: the port is in use or not allowed. UsageError: no such address on this machine.
    """

    def __init__(self, board: Board, host: str, port: int) -> None:
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._http = _Http(board, (host, port), family)
        except OSError as error:
            raise _refused(error, f"{host}:{port}", port) from None
        bound = self._http.server_address
        self.port = int(bound[1])
        name = str(bound[0])
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True, name="exporter http")
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def _refused(error: OSError, place: str, port: int) -> DflashError:
    if error.errno == errno.EADDRINUSE:
        return DflashError(f"port {port} is in use", place, f"end what listens there, or --listen 127.0.0.1:{port + 1}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DflashError(f"port {port} may not be used by this user", place, "take a port above 1023")
    return UsageError(f"cannot listen there: {error.strerror or error}", place, "give an address of this machine")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, board: Board, at: tuple[str, int], family: int) -> None:
        self.address_family = socket.AddressFamily(family)
        self.board = board
        self.room = threading.BoundedSemaphore(_CLIENTS)
        super().__init__(at, _Client)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for our name, which may hang.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be had
            self.room.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no news."""


class _Client(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server: _Http
    server_version = "dflash-ops"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._say(200, "text/plain; version=0.0.4; charset=utf-8", self.server.board.text())
        elif path == "/":
            self._say(200, "text/plain; charset=utf-8", b"dflash-ops exporter: /metrics\n")
        else:
            self._say(404, "text/plain; charset=utf-8", b"there is /metrics only\n")

    do_HEAD = do_GET

    def _say(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


def textfile(text: str) -> Path:
    """The path of `--textfile`, checked before anything is asked.

    Raises:
        UsageError: no `.prom` file, or as `file.refuse`.
    """
    path = Path(text)
    if path.suffix != ".prom":
        raise UsageError(f"{text!r} is no file that ends in .prom", "--textfile", "node_exporter reads *.prom only")
    file.refuse(path, "--textfile")
    return path


def write(board: Board, path: Path) -> None:
    """Replace the file in one step.

    Raises:
        DflashError: it cannot be written; the old one is as it was.
    """
    file.put(path, board.text(), "the metrics", "see whether it may be written")
