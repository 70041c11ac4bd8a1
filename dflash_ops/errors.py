"""The one exception tree. Every error says what was tried, where, and what to do next.

::

    DflashError                    exit 1
    ├── UsageError                 exit 2   arguments that cannot be meant
    ├── InventoryError             exit 2   file, key, line and the fix
    ├── HostError                  exit 5   the way to the machine
    │   ├── HostUnreachable                 no connection could be made
    │   │   ├── HostKeyUnknown              a host that known_hosts does not know: `accept_new` takes its key
    │   │   ├── HostKeyChanged              another key than the known one: never accepted
    │   │   └── AuthenticationFailed        no key was taken, or a key cannot be opened
    │   ├── ConnectionLost                  it was there and went away: never a result
    │   ├── DeadlineExceeded                the call did not answer in its time
    │   ├── NotRoot                         pct or sudo refuses this user
    │   ├── NotProxmox                      there is no pct on that host
    │   └── ContainerError                  pct says no
    │       ├── ContainerMissing            no container of this number
    │       ├── ContainerStopped            it does not run, or stopped while a command ran in it
    │       └── ContainerLocked             a backup, migration or another pct holds it
    ├── CommandFailed              exit 1   a remote command ran and said no
    ├── DeployError                exit 1
    │   ├── ReleaseError                    the code to send is not fit to be sent
    │   ├── TransferError                   sent, but what arrived is not what left
    │   ├── PreflightError         exit 3   the machine or the job is not ready
    │   ├── JobBusy                exit 4   it runs, or its session name is taken
    │   │   └── LeaseLost                   another supervisor acts on it by now
    │   └── StartError                      the trainer did not come up
    ├── StateError                 exit 6   files in the run folder are damaged or too new
    └── ContractError              exit 6   a message that is not in the agreed form
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: What `dflash-ops` leaves with: the one list. `--help` and docs/cli.md print it, docs/contracts.md repeats it.
EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "it failed; the message says what, where and what next",
    2: "bad arguments or inventory",
    3: "preflight refused, or doctor found something to mend",
    4: "busy: the job runs, or the session name is taken",
    5: "host unreachable, connection lost, or deadline passed",
    6: "state on the host is damaged or of a newer schema",
    130: "Ctrl-C",
}


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near."""
    import difflib  # only where something went wrong: it costs a start 4 ms

    names = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


class DflashError(Exception):
    """An error that a person reads.

    Args:
        what: what was tried and how it failed.
        where: host, file, key or line; empty where `what` names it.
        next: what to do now, as an imperative sentence or a command.

    Attributes:
        result: what `--json` prints of a command that came to something all the same.
    """

    exit_code = 1
    result: dict[str, Any] | None = None

    def __init__(self, what: str, where: str = "", next: str = "") -> None:
        self.what = what
        self.where = where
        self.next = next
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f"\n  where: {self.where}"
        if self.next:
            text += f"\n  next:  {self.next}"
        return text

    def to_json(self) -> dict[str, str]:
        """`error` of an answer, as `--json` and the resident say it."""
        return {"type": type(self).__name__, "what": self.what, "where": self.where, "next": self.next}


class UsageError(DflashError):
    exit_code = 2


class InventoryError(DflashError):
    """A fault of inventory.toml.

    Args:
        what: the fault.
        file: path of the inventory.
        key: dotted key, empty for the file as a whole.
        line: 1-based line, None where no line can be named.
        fix: what to write instead.
    """

    exit_code = 2

    def __init__(self, what: str, *, file: str, key: str = "", line: int | None = None, fix: str = "") -> None:
        self.file = file
        self.key = key
        self.line = line
        self.fix = fix
        place = file + (f":{line}" if line is not None else "") + (f", key {key}" if key else "")
        super().__init__(what, place, fix)


class HostError(DflashError):
    exit_code = 5


class HostUnreachable(HostError):
    pass


class HostKeyUnknown(HostUnreachable):
    pass


class HostKeyChanged(HostUnreachable):
    pass


class AuthenticationFailed(HostUnreachable):
    pass


class ConnectionLost(HostError):
    pass


class DeadlineExceeded(HostError):
    pass


class NotRoot(HostError):
    pass


class NotProxmox(HostError):
    pass


class ContainerError(HostError):
    pass


class ContainerMissing(ContainerError):
    pass


class ContainerStopped(ContainerError):
    pass


class ContainerLocked(ContainerError):
    pass


class CommandFailed(DflashError):
    """A remote command ran and failed: `rc` is its exit code, `stderr` the end of what it said."""

    def __init__(self, what: str, where: str = "", next: str = "", *, rc: int = 1, stderr: str = "") -> None:
        self.rc = rc
        self.stderr = stderr
        super().__init__(what, where, next)


class DeployError(DflashError):
    pass


class ReleaseError(DeployError):
    pass


class TransferError(DeployError):
    pass


class PreflightError(DeployError):
    exit_code = 3


class JobBusy(DeployError):
    exit_code = 4


class LeaseLost(JobBusy):
    pass


class StartError(DeployError):
    pass


class StateError(DflashError):
    exit_code = 6


class ContractError(DflashError):
    exit_code = 6


#: By name, so that an error said by the resident (JSON) becomes the same class on the operator's side.
BY_NAME: dict[str, type[DflashError]] = {
    cls.__name__: cls
    for cls in (
        DflashError,
        UsageError,
        HostError,
        HostUnreachable,
        HostKeyUnknown,
        HostKeyChanged,
        AuthenticationFailed,
        ConnectionLost,
        DeadlineExceeded,
        NotRoot,
        NotProxmox,
        ContainerError,
        ContainerMissing,
        ContainerStopped,
        ContainerLocked,
        CommandFailed,
        DeployError,
        ReleaseError,
        TransferError,
        PreflightError,
        JobBusy,
        LeaseLost,
        StartError,
        StateError,
        ContractError,
    )
}
