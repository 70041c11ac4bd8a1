"""The operator's side of an adopted session: the same questions as of a job, other answers; and how one is adopted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_ops.client import ASK_S, STOP_MORE_S, JobClient, Seen
from dflash_ops.contracts import Snapshot, State
from dflash_ops.errors import CommandFailed, UsageError


class AdoptedClient(JobClient):
    """A session that dflash-ops did not start. Starting, switching and setting aside are refused."""

    def seen(self, *, deadline: float = ASK_S) -> Seen:
        try:
            said = self.ask("adopted-snapshot", deadline=deadline)
        except CommandFailed as error:
            if error.rc == 2 and "never deployed" in error.what:
                return self._never()
            raise
        self._lost = None
        snapshot = self._understood(said, "adopted-snapshot")
        return Seen(snapshot, snapshot.t)

    def _never(self) -> Seen:
        import time

        now = time.time()
        detail = f"not adopted there yet: dflash-ops adopt {self.job.host} --session {self.job.session}"
        return Seen(Snapshot(self.job.name, now, State.UNKNOWN, now, detail), now, deployed=False)

    def follow(self, *, idle: float = 15.0, forever: bool = False) -> Iterator[Seen]:
        try:
            yield from self._follow("adopted-follow", idle=idle, forever=forever)
        except CommandFailed as error:
            if not forever or error.rc != 2 or "--forever" not in error.stderr:
                raise
            yield from self._follow("adopted-follow", idle=idle, forever=False)  # a resident of before that option

    def logs(
        self, *, follow: bool = False, worker: str | None = None, attempt: int | None = None, lines: int = 100
    ) -> Iterator[bytes]:
        if worker is not None or attempt is not None:
            raise UsageError(
                f"job {self.job.name} is adopted: it has one log, its pane's", "--worker, --attempt", "leave them out"
            )
        options = ["--lines", str(lines), *(["--follow"] if follow else [])]
        return self._stream("adopted-logs", *options, idle=6 * 3600.0 if follow else 60.0)

    def stop(self, *, grace: float, reason: str = "", actor: str = "operator") -> dict[str, Any]:
        """TERM to the trainer; never KILL."""
        return self.ask(
            "adopted-stop", "--grace", f"{grace:g}", "--reason", reason, "--actor", actor, deadline=grace + STOP_MORE_S
        )

    def start(self, spec: Any) -> dict[str, Any]:
        raise self._refused("start")

    def activate(self, release: str, *, actor: str = "operator") -> dict[str, Any]:
        raise self._refused("activate")

    def aside(self, *, reason: str = "", actor: str = "operator") -> dict[str, Any]:
        raise self._refused("aside")

    def record(
        self, event: str, data: Mapping[str, Any], *, actor: str = "operator", attempt: int | None = None
    ) -> dict[str, Any]:
        raise self._refused("record")

    def _refused(self, what: str) -> UsageError:
        return UsageError(
            f"job {self.job.name} is adopted: there is nothing to {what}", self.job.inventory, "docs/adopt.md"
        )
