"""Is this machine ready for this job? `resident preflight --root ROOT`, request on standard input (docs/deploy.md).

The rule here: every check runs and every failing one is told at once with its next step; what could not be judged is
`skipped` and says why, never `ok`. Nothing is changed but a probe file that is removed again (and not even that where
`touch` is false).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dflash_ops.contracts import Layout, from_dict, to_dict


@dataclass(frozen=True)
class Request:
    """What is to be started.

    Args:
        root, interpreter, session, socket, checkpoints: as in the job, absolute or found in PATH.
        argv: the job's command, placeholders filled as far as they are known; `program` = its first word.
        bundled: whether it is the bundled trainer (then `config` is its text, in a file called `config_name`).
        release: id of the release that is to run, None if the job has none; `send_files` and `send_bytes` are still
            to be sent (0 = it is there).
        devices: torch names, one for each worker, targets first; `targets` of them are targets.
        requires: module -> version range (`>=2.11,<2.15`).
        start: `resume`, `fresh` or empty.
        pid: launcher of the running attempt that is to be replaced; its memory comes back.
        checkpoint_bytes: size of one checkpoint where the trainer's own check does not say.
        touch: whether a file may be written to see if that works.
    """

    SCHEMA: ClassVar[int] = 1

    root: str
    interpreter: str
    argv: tuple[str, ...]
    checkpoints: str
    session: str
    socket: str
    bundled: bool = False
    release: str | None = None
    send_files: int = 0
    send_bytes: int = 0
    config: str = ""
    config_name: str = "run.toml"
    env: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    targets: int = 0
    requires: dict[str, str] = field(default_factory=dict)
    start: str = ""
    pid: int | None = None
    checkpoint_bytes: int = 0
    touch: bool = True
    schema: int = 1

    @property
    def layout(self) -> Layout:
        return Layout(Path(self.root))

    @property
    def release_there(self) -> bool:
        return self.release is not None and self.send_files == 0 and self.layout.release(self.release).is_dir()

    def environment(self) -> dict[str, str]:
        """The environment in which the job's interpreter is asked, placeholders filled."""
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **{k: self.fill(v) for k, v in self.env.items()}}

    def fill(self, text: str) -> str:
        release = str(self.layout.release(self.release)) if self.release else self.root
        for name, value in (("{root}", self.root), ("{release}", release), ("{checkpoints}", self.checkpoints)):
            text = text.replace(name, value)
        return text


@dataclass(frozen=True)
class Check:
    """One check's result; `status` is ok, warn, failed or skipped; `next` is what to do about a warn or failed."""

    name: str
    status: str
    what: str
    next: str = ""


@dataclass
class Needs:
    """What the trainer's own check says it will take, bytes; None = not known."""

    ring_bytes: int | None = None
    average_bytes: int | None = None
    target_bytes_per_worker: int | None = None
    drafter_bytes_per_worker: int | None = None
    checkpoint_bytes: int | None = None
    said: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Needs:
        numbers = {k: v for k, v in said.items() if isinstance(v, int) and not isinstance(v, bool)}
        return cls(**{k: numbers.get(k) for k in list(cls.__dataclass_fields__) if k != "said"}, said=said)


def run_checks(request: Request) -> tuple[list[Check], Needs]:
    """All checks in the order in which a person would want to read them."""
    from dflash_ops.resident import checks

    found: list[Check] = []
    needs = Needs()
    found += checks.root(request)
    found += checks.session(request)
    found += checks.interpreter(request)
    # The trainer is asked only through an interpreter that runs; it also says how much memory and disk it will take.
    if request.bundled:
        usable = all(c.status in ("ok", "warn") for c in found if c.name in ("interpreter", "imports"))
        asked, needs = checks.trainer(request) if usable else (_not_asked(), Needs())
        found += asked
    for check in _rest(request, needs):
        found += check()
    return found, needs


def _not_asked() -> list[Check]:
    return [Check("config", "skipped", "not checked: the interpreter cannot run the trainer")]


def _rest(request: Request, needs: Needs) -> Iterator[Callable[[], list[Check]]]:
    from dflash_ops.resident import checks

    yield lambda: checks.devices(request)
    yield lambda: checks.disk(request, needs)
    yield lambda: checks.shared_memory(request, needs)
    yield lambda: checks.memory(request, needs)
    yield lambda: checks.checkpoints(request)


def preflight(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a JSON request.

    Raises:
        ContractError: the request is not in the agreed form.
    """
    checks, needs = run_checks(from_dict(Request, data, "preflight request"))
    return {"schema": 1, "checks": [to_dict(c) for c in checks], "needs": needs.said}


def main() -> int:
    from dflash_ops.resident.receive import say

    raw = sys.stdin.buffer.readline()
    return say(lambda: preflight(json.loads(raw)))


if __name__ == "__main__":
    sys.exit(main())
