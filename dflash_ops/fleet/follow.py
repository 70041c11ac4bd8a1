"""Streams that last: what each job says each second, over links that fail and come back.

The rule here: whatever is shown says how old it is, by the clock of the job's own machine; an old snapshot never looks
new, a link that is gone is said, after IDLE_S of silence at the latest, and nothing that hangs keeps a caller.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, Literal, TypeVar

from dflash_ops.client import JobClient, Seen
from dflash_ops.contracts import ENDED_STATES, Snapshot, State
from dflash_ops.errors import AuthenticationFailed, DflashError, HostKeyChanged

#: `connecting`: nothing was heard yet; `live`: it speaks; `lost`: it does not, and the next try is awaited;
#: `retrying`: a try is under way; `over`: the watch was to end with the job, and the job has ended.
Link = Literal["connecting", "live", "lost", "retrying", "over"]

#: Seconds of silence after which a link counts as lost. The other side says something at least every 2 s.
IDLE_S = 12.0

#: Seconds before each try to come back; the last one again and again. Up to a fifth more, so that many streams that
#: were lost together do not come back in one moment.
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 12.5)

#: Seconds before the next try where the machine refused us: a guard there may count them.
REFUSED_S = 60.0

#: Seconds for the first look of a connection, and of one that was not said to be lost: with ASK_S that is under the
#: 15 s in which it must be.
ASK_FIRST_S, FIRST_S = 20.0, 9.5

#: Seconds between looks at a job that was never deployed, or whose resident ends the stream with the job.
ASK_S = 5.0

#: Lines by which the other machine's clock is compared with this one's.
COMPARED = 30

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Look:
    """What is known of one job (or of one node of it) at this moment.

    Attributes:
        seen: the newest that was heard, None while nothing was.
        age_s: how old that is now, seconds: by its machine's clock, and the time since.
        link: see `Link`. lost_since: when the link was lost (this machine's clock, since the epoch).
        error: why, in one line. tries: attempts to come back since then.
    """

    seen: Seen | None = None
    age_s: float | None = None
    link: Link = "connecting"
    lost_since: float | None = None
    error: str = ""
    tries: int = 0

    def state(self, job: str, now: float | None = None) -> Seen:
        """What `status` would say: the newest while the link lives, else `unreachable` since it was lost."""
        if self.seen is not None and self.link in ("live", "over"):
            return self.seen
        now = time.time() if now is None else now
        if self.lost_since is None:
            return Seen(Snapshot(job, now, State.UNKNOWN, now, "not heard of yet"), now)
        return Seen(Snapshot(job, now, State.UNREACHABLE, self.lost_since, self.error), now)


class _Clocks:
    """The other machine's clock seen from here: the line that travelled fastest tells how the two stand."""

    def __init__(self) -> None:
        self._apart: deque[float] = deque(maxlen=COMPARED)
        self._last = float("-inf")

    def heard(self, there: float, here: float) -> None:
        if there < self._last:
            self._apart.clear()  # its clock was set back
        self._last = there
        self._apart.append(here - there)

    def age(self, t: float, here: float) -> float:
        """Seconds from `t` there until `here`."""
        return max(0.0, here - t - min(self._apart, default=here - t))


class Stream:
    """One job's news for as long as it is wanted; `run` in a thread of its own, `look` from any.

    Args:
        client: the job; nothing is connected before `run`.
        ends: end with the job (finished, stopped, crashed, never deployed), instead of waiting for what comes next.
        on_news: called (in the stream's thread) when `look` has something new.
        idle: see IDLE_S. pauses: see PAUSES_S. clock: monotonic seconds. wall: seconds since the epoch.
    """

    def __init__(
        self,
        client: JobClient,
        *,
        ends: bool = False,
        on_news: Callable[[], None] = lambda: None,
        idle: float = IDLE_S,
        pauses: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._ends = ends
        self._on_news = on_news
        self._idle = idle
        self._pauses = pauses
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._clocks = _Clocks()
        self._failures = 0
        self._known = Look()
        self._fault: BaseException | None = None

    def look(self) -> Look:
        """What is known now; never waits.

        Raises:
            BaseException: a fault of ours that ended `run`.
        """
        if self._fault is not None:
            raise self._fault
        with self._lock:
            known = self._known
            if known.seen is None:
                return known
            age = self._clocks.age(known.seen.snapshot.t, self._clock())
            return replace(known, age_s=age)

    def stop(self) -> None:
        """End soon: at the next line, or at once where it waits for the next try."""
        self._stop.set()

    def run(self) -> None:
        """Listen until `stop`, or until the job has ended where that was asked for."""
        try:
            while not self._stop.is_set():
                pause = self._once()
                if pause is None:
                    return
                self._stop.wait(pause)
        except BaseException as fault:  # noqa: BLE001  not lost with this thread: `look` raises it
            self._fault = fault
        finally:
            self._on_news()

    def _once(self) -> float | None:
        """One connection, from the first look to its end; the seconds to wait then, None: it is over."""
        self._trying()
        try:
            return self._listen()
        except DflashError as error:
            return self._lost(error)

    def _listen(self) -> float | None:
        first = self._client.seen(deadline=FIRST_S if self._known.link == "live" else ASK_FIRST_S)
        self._heard(first)
        if self._stop.is_set():
            return None
        if not first.deployed or (self._ends and first.snapshot.state in ENDED_STATES):
            return self._over_or(ASK_S)
        last = first
        lines = self._client.follow(idle=self._idle, forever=True)  # when it is over is for us to say
        try:
            for last in lines:
                self._failures = 0  # not at the first look: a machine out of breath is left time between tries
                self._heard(last)
                if self._stop.is_set():
                    return None
                if self._ends and last.snapshot.state in ENDED_STATES:
                    return self._over_or(ASK_S)
        finally:
            getattr(lines, "close", lambda: None)()
        if last.snapshot.state in ENDED_STATES:
            return ASK_S  # a resident of before `--forever`
        return self._lost(DflashError("the resident there ended the stream"))

    def _heard(self, seen: Seen) -> None:
        with self._lock:
            here = self._clock()
            if self._known.link != "live":
                self._clocks = _Clocks()  # what stood in the way of the last connection tells nothing of this one
            self._clocks.heard(seen.now, here)
            before = self._known.seen.snapshot if self._known.seen is not None else None
            if before is not None and before.attempt == seen.snapshot.attempt and not seen.snapshot.curves:
                # a first look has none: a stream that comes back does not lose its curves until its first line
                seen = replace(seen, snapshot=replace(seen.snapshot, curves=before.curves))
            self._known = Look(seen, link="live")
        self._on_news()

    def _trying(self) -> None:
        with self._lock:
            if self._known.link == "lost":
                self._known = replace(self._known, link="retrying", tries=self._known.tries + 1)
        self._on_news()

    def _over_or(self, pause: float) -> float | None:
        if not self._ends:
            return pause
        with self._lock:
            self._known = replace(self._known, link="over")
        return None

    def _lost(self, error: DflashError) -> float:
        text = error.what.splitlines()[0] if error.what else type(error).__name__
        with self._lock:
            since = self._known.lost_since
            self._known = replace(
                self._known, link="lost", error=text, lost_since=since if since is not None else self._wall()
            )
        self._on_news()
        if isinstance(error, (AuthenticationFailed, HostKeyChanged)):
            return REFUSED_S
        pause = self._pauses[min(self._failures, len(self._pauses) - 1)]
        self._failures += 1
        return pause * random.uniform(1.0, 1.2)


class Watch(Generic[K]):
    """Several jobs or nodes, a stream each.

    ::

        with Watch({"main": client}) as watch:
            while not enough():
                watch.wait(0.5)
                draw(watch.looks())

    Args:
        clients: by whatever tells them apart for the caller. ends, idle, pauses: as of `Stream`.
    """

    def __init__(
        self,
        clients: Mapping[K, JobClient],
        *,
        ends: bool = False,
        idle: float = IDLE_S,
        pauses: Sequence[float] = PAUSES_S,
    ) -> None:
        self._news = threading.Condition()
        self._count = self._told = 0
        self._streams = {
            key: Stream(client, ends=ends, on_news=self._ring, idle=idle, pauses=pauses)
            for key, client in clients.items()
        }
        # Daemons: one that hangs in a dead connection must not keep the program from its end.
        self._threads = [
            threading.Thread(target=s.run, name=f"watch {key}", daemon=True) for key, s in self._streams.items()
        ]
        for thread in self._threads:
            thread.start()

    def looks(self) -> dict[K, Look]:
        """What is known of each now; never waits.

        Raises:
            BaseException: a fault of ours that ended a stream.
        """
        return {key: stream.look() for key, stream in self._streams.items()}

    def wait(self, seconds: float) -> bool:
        """Wait for news, `seconds` at most; whether there is any since the last call."""
        with self._news:
            self._news.wait_for(lambda: self._count != self._told, seconds)
            news = self._count != self._told
            self._told = self._count
        return news

    @property
    def over(self) -> bool:
        """Whether all streams have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, seconds: float = 0.5) -> None:
        """Ask all streams to end, and wait for it `seconds` at most: what hangs ends with its connection."""
        for stream in self._streams.values():
            stream.stop()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Watch[K]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ring(self) -> None:
        with self._news:
            self._count += 1
            self._news.notify_all()
