"""The launchers' blackboard: a TCPStore at the endpoint, hosted by node 0's launcher, in which each node keeps its
report and node 0 its decision.

All of its waits are in a thread, so that the launcher's loop never waits for a network. A wire that was cut says
nothing, not even an end-of-file, and some of the store's calls have no deadline: so what counts is when the last whole
exchange was. A thread in which there is none for too long is left to itself, and another one connects anew.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.errors import ConfigError
from trainer.meeting import Decision, Report
from trainer.node_args import NodeArgs

#: Seconds of one call to the store that has a deadline.
CALL_S = 5.0
#: Seconds between two exchanges: of few nodes, and what each more node adds.
EXCHANGE_S, EXCHANGE_MORE_S = 0.2, 0.004
_DECISION = "dflash/decision"


def _key(rank: int) -> str:
    return f"dflash/report/{rank}"


@dataclass
class _Seen:
    """A node's newest report, and when its last sign of life came (monotonic)."""

    report: Report
    at: float


class Link:
    """One launcher's end. `start` it, `publish` a report, read `reports` and `decision`.

    Args:
        args: this node's place. lost_after_s: seconds of silence after which a node, or the endpoint, counts as lost.
    """

    def __init__(self, args: NodeArgs, lost_after_s: float) -> None:
        self.args = args
        self.lost_after_s = lost_after_s
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._own: Report | None = None
        self._delivered: Report | None = None
        self._ours: Decision | None = None
        self._seen: dict[int, _Seen] = {}
        self._decision = Decision()
        self._session: _Session | None = None
        self._since = time.monotonic()
        self._met = 0.0
        self._beat = 0
        self.trouble = ""
        self.server: Any = None

    def start(self) -> None:
        """
        Raises:
            ConfigError: this is node 0, and the endpoint cannot be listened at.
        """
        if self.args.rank == 0:
            try:
                self.server = dist.TCPStore(  # type: ignore[attr-defined]
                    self.args.host, self.args.port, None, True, timedelta(seconds=CALL_S), wait_for_workers=False
                )
            except (dist.DistError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"node 0 cannot listen at {self.args.endpoint}: {_first_line(error)}",
                    "--rdzv-endpoint",
                    "another port, or end what listens there",
                ) from error
            for rank in range(self.args.count):
                self.server.set(_key(rank), "")
            self.server.set(_DECISION, "")
        self._connect()

    def _connect(self) -> None:
        self._session = _Session(self)
        self._session.start()

    # ---- the launcher's side

    def publish(self, report: Report) -> None:
        """What this node says of itself from now on; `beat` is filled in."""
        with self._lock:
            changed = report != self._own
            self._own = report
        if changed and self._session is not None:
            self._session.wake.set()

    def decide(self, decision: Decision) -> None:
        """Node 0: what it has decided."""
        with self._lock:
            self._ours = decision
        if self._session is not None:
            self._session.wake.set()

    @property
    def reports(self) -> dict[int, Report]:
        """The newest report of each node that ever spoke, this one's own included."""
        with self._lock:
            found = {rank: seen.report for rank, seen in self._seen.items()}
            if self._own is not None:
                found[self._own.rank] = self._own
        return found

    @property
    def decision(self) -> Decision:
        with self._lock:
            return self._ours or self._decision

    def alive(self) -> set[int]:
        """Nodes that were heard lately. While the endpoint is out of reach nobody's silence means anything."""
        if self.silent_s > 2 * EXCHANGE_S + self._pause:
            return set(range(self.args.count))
        limit = max(self._met, time.monotonic() - self.lost_after_s)
        with self._lock:
            heard = {rank for rank, seen in self._seen.items() if seen.at >= limit or self._fresh}
        return heard | {self.args.rank}

    @property
    def _fresh(self) -> bool:
        """Just connected: silence is measured from here on."""
        return time.monotonic() - self._met < self.lost_after_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last whole exchange with the endpoint."""
        with self._lock:
            return time.monotonic() - self._since

    @property
    def delivered(self) -> Report | None:
        """The report, as `publish` got it, that was last at the endpoint as a whole."""
        with self._lock:
            return self._delivered

    @property
    def lost(self) -> bool:
        """The endpoint has been out of reach for too long."""
        return self.silent_s > self.lost_after_s

    def look(self) -> None:
        """Empties the reader, and connects anew where a thread has come to nothing."""
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(1 << 12)
        session = self._session
        if session is not None and (not session.is_alive() or session.stuck_s > self.lost_after_s):
            session.left = True
            self._connect()

    def close(self) -> None:
        if self._session is not None:
            self._session.left = True
            self._session.wake.set()
            self._session.join(0.5)
        self.reader.close()

    # ---- the thread's side

    @property
    def _pause(self) -> float:
        return EXCHANGE_S + EXCHANGE_MORE_S * self.args.count

    def _outbox(self) -> tuple[dict[str, str], Report | None]:
        """What is to be set, and the report in it."""
        with self._lock:
            out, own = {}, self._own
            if self._own is not None:
                self._beat += 1
                out[_key(self.args.rank)] = json.dumps(replace(self._own, beat=self._beat).to_dict())
            if self._ours is not None:
                out[_DECISION] = json.dumps(self._ours.to_dict())
        return out, own

    def _heard(self, raw: dict[str, bytes], told: Report | None) -> None:
        """After a whole exchange. `told`: the report that was set in it."""
        now, news = time.monotonic(), False
        with self._lock:
            self._delivered = told
            if now - self._since > self.lost_after_s or not self._met:
                self._met = now
            self._since, self.trouble = now, ""
            for key, value in raw.items():
                if not value:
                    continue
                if key == _DECISION:
                    decision = Decision.from_dict(json.loads(value))
                    news, self._decision = news or decision != self._decision, decision
                    continue
                report = Report.from_dict(json.loads(value))
                before = self._seen.get(report.rank)
                if before is not None and before.report.life == report.life and report.beat <= before.report.beat:
                    continue  # no sign of life; or, of a connection that was left, an older one
                news = news or before is None or replace(before.report, beat=0) != replace(report, beat=0)
                self._seen[report.rank] = _Seen(report, now)
        if news:
            with contextlib.suppress(OSError):  # full: the launcher will look anyway
                self._writer.send(b"x")


class _Session(threading.Thread):
    """One connection to the store."""

    def __init__(self, link: Link) -> None:
        super().__init__(daemon=True, name="link")
        self.link = link
        self.left = False
        self.wake = threading.Event()
        self._at = time.monotonic()

    def _is_left(self) -> bool:
        return self.left

    @property
    def stuck_s(self) -> float:
        return time.monotonic() - self._at

    def run(self) -> None:
        link = self.link
        keys = [*(_key(rank) for rank in range(link.args.count)), _DECISION]
        try:
            if link.server is None:  # torch tells of a refused connection at length, and with a stack of its own
                socket.create_connection((link.args.host, link.args.port), timeout=CALL_S).close()
            store = link.server or dist.TCPStore(  # type: ignore[attr-defined]
                link.args.host,
                link.args.port,
                None,
                False,
                timedelta(seconds=min(CALL_S, link.lost_after_s)),
                wait_for_workers=False,
            )
            while not self.left:
                out, told = link._outbox()
                for key, text in out.items():
                    store.set(key, text)
                values = store.multi_get(keys)
                if self._is_left():
                    return
                self._at = time.monotonic()
                link._heard(dict(zip(keys, values, strict=True)), told)
                self.wake.wait(link._pause)
                self.wake.clear()
        except (dist.DistError, RuntimeError, ValueError, OSError) as error:
            link.trouble = _first_line(error)
            time.sleep(link._pause)  # a port that refuses does so at once


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
