"""What a supervisor can do to the world: the seam between deciding and doing. The resident implements it.

The rules that every implementation keeps:

- Each call is idempotent: done twice it is done once (a supervisor may be killed between two of them).
- Each call has a deadline and raises when it could not be kept; none returns as if it had worked.
- Nothing but our own recorded processes (pid and start time) is ever ended; no checkpoint is ever deleted.
"""

from __future__ import annotations

from typing import Any, Protocol

from dflash_ops.contracts import Event, Overlay
from dflash_ops.errors import DflashError


class EffectFailed(DflashError):
    """An effect could not be brought about; what it had begun is as it was, or is said in `what`."""


class Effects(Protocol):
    def fenced(self) -> bool:
        """Whether we may still act: the lease is ours (by our token, asked anew), and no person asked for a stop.

        Asked before each of the other calls.
        """
        ...

    def journal(self, event: str, data: dict[str, Any], attempt: int | None) -> Event:
        """Write an event down; it is on the disk when this returns (actor `supervisor`).

        Raises:
            OSError, DflashError: it is not written: then nothing may be done.
        """
        ...

    def dump_stacks(self, attempt: int, seconds: float) -> str:
        """Where every worker stands, as text (py-spy, else faulthandler by signal); kept in the attempt's evidence.

        Raises:
            EffectFailed: no worker's stack could be had.
        """
        ...

    def end(self, attempt: int, seconds: float) -> None:
        """TERM to the recorded launcher, KILL after the grace time, until its whole recorded family is gone.

        Of an attempt that has ended: what it left behind. Its stop record names the actor `supervisor`.

        Raises:
            EffectFailed: something of it still lives after `seconds`.
        """
        ...

    def wait_for(self, what: str, seconds: float) -> None:
        """Return when it is there: `memory` (of our ended processes on the GPUs), `disk`, `network`.

        Raises:
            EffectFailed: not within `seconds`.
        """
        ...

    def set_aside(self, newer_than: int | None, reason: str) -> str:
        """Move checkpoints newer than this step (None: all of them) aside, whole, with a manifest; gives the place.

        Raises:
            EffectFailed: nothing was moved.
        """
        ...

    def free_port(self) -> int:
        """A TCP port that nobody listens on now."""
        ...

    def write_overlay(self, overlay: Overlay) -> None:
        """Replace run/overlay.json, atomically."""
        ...

    def start(self, overlay: Overlay, *, fresh: bool, release: str | None, decision: str, reason: str) -> int:
        """Start the job's next attempt with this overlay; gives its number. If an attempt of this `decision` is there
        already, that number and nothing else.

        Args:
            overlay: on `supervise.remedies.apply`'s terms. fresh: from the beginning (checkpoints are aside).
            release: another one than last time. decision: kept in the attempt's `attempt_started` event.

        Raises:
            EffectFailed: it did not come up; nothing of it is left.
        """
        ...

    def tell(self, title: str, text: str, fingerprint: str = "") -> None:
        """Tell a person, once in a while for each title and fingerprint.

        Never raises for a sink that is down: it says so in resident.log.
        """
        ...
