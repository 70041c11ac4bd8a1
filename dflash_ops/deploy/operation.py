"""What deploy and rollback share: the machine, counted; the resident there; secrets that never reach a text."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from dflash_ops.client import JobClient
from dflash_ops.deploy import boot, transfer
from dflash_ops.deploy.release import Built
from dflash_ops.deploy.transfer import Pack, build_pack
from dflash_ops.hosts.base import Completed, Conversation, Host
from dflash_ops.inventory import Job
from dflash_ops.view.stages import Stages

PROBE = "dflash_ops.resident.probe"

#: Shortest secret that is looked for in texts: a shorter one would blot out half of them.
SHORTEST = 4


class Counted:
    """A host that counts the commands that are run on it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.name = host.name
        self.execs = 0

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        self.execs += 1
        return self._host.run(argv, deadline=deadline, stdin=stdin, env=env, cwd=cwd)

    def converse(self, argv: Sequence[str], *, deadline: float) -> AbstractContextManager[Conversation]:
        self.execs += 1
        return self._host.converse(argv, deadline=deadline)

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        self.execs += 1
        return self._host.stream(argv, idle=idle, stdin=stdin)

    def fetch(self, path: str, *, deadline: float, limit: int) -> bytes:
        self.execs += 1
        return self._host.fetch(path, deadline=deadline, limit=limit)

    def terminal(self, argv: Sequence[str]) -> int:
        return self._host.terminal(argv)

    def close(self) -> None:
        self._host.close()


class Operation:
    """Something that changes one job on one machine.

    Args:
        host, python: the job's machine and the Python there that runs the resident.
        environ: where the job's secrets are looked up.
    """

    def __init__(self, host: Host, job: Job, stages: Stages, *, python: str, environ: Mapping[str, str]) -> None:
        self.host, self.job, self.stages, self.python = Counted(host), job, stages, python
        self.environ = environ
        self.where = f"{host.name}: {job.root}"
        self.secrets: Mapping[str, str] = {}
        #: Set where watching has no sense any more: another node of the same job has crashed.
        self.halt = threading.Event()
        #: Where the resident of our own version lies there, once that is known.
        self.at = ""

    @cached_property
    def pack(self) -> Pack:
        return build_pack()

    @cached_property
    def client(self) -> JobClient:
        """The job asked through the resident of our own version, whatever `resident/current.pyz` is."""
        return JobClient(self.host, self.job, self.python, resident=self.pack.id)

    def found(self) -> None:
        """The resident is there: from here on it is not sent along."""
        self.at = f"{self.job.root}/resident/{self.pack.id}.pyz"

    def ask(self, module: str, request: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        """One module of the resident, before and after it is installed.

        Raises:
            HostError, DflashError: as `boot.call`.
        """
        return boot.call(
            self.host,
            self.python,
            self.pack.content,
            f"dflash_ops.resident.{module}",
            request,
            deadline=deadline,
            at=self.at,
        )

    def question(self, built: Built | None, *, deadline: float, **more: Any) -> AbstractContextManager[transfer.Upload]:
        """What is there (`more`: fields of resident/probe.py's request), on an exec that takes what is lacking then.

        Raises:
            HostError, DflashError: as `boot.talk`.
        """
        request = {
            "root": self.job.root,
            "release": built.manifest if built is not None else None,
            "resident": self.pack.id,
            "resident_bytes": len(self.pack.content),
            **more,
        }
        return transfer.question(
            self.host, self.python, self.pack, PROBE, request, built, root=self.job.root, deadline=deadline
        )

    def mask(self, text: str) -> str:
        """`text` without the values of the job's secrets: a trainer's last words may hold them."""
        for value in sorted(self.secrets.values(), key=len, reverse=True):
            if len(value) >= SHORTEST:
                text = text.replace(value, "***")
        return text
