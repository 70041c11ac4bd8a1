"""Is this machine ready for this job? `resident preflight --root ROOT`, request on standard input (docs/deploy.md).

The rule here: every check runs and every failing one is told at once with its next step; what could not be judged is
`skipped` and says why, never `ok`. Nothing is changed but a probe file that is removed again (and not even that where
`touch` is false).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dflash_ops.contracts import JobSpec, Layout, from_dict, to_dict
from dflash_ops.resident.spec import checkpoints_folder, command


@dataclass(frozen=True)
class Request:
    """What is to be started.

    Args:
        spec: the job as `start` would get it, secrets included (they are not written down here either).
        interpreter: the job's Python; `bundled` = it runs the bundled trainer, whose config is `config_toml`, and
            `config_json` for an interpreter without tomllib (3.10).
        send_files, send_bytes: of the release, still to be sent (0 = it is there).
        devices: torch names, one for each worker, targets first; `targets` of them are targets.
        requires: module -> version range (`>=2.11,<2.15`).
        begin: `resume`, `fresh` or empty.
        pid: launcher of the running attempt that is to be replaced; its memory comes back.
        touch: whether a file may be written to see if that works.
        venv_pending: the interpreter's environment is still to be made.
    """

    SCHEMA: ClassVar[int] = 1

    spec: JobSpec
    interpreter: str
    bundled: bool = False
    config_toml: str = ""
    config_json: str = ""
    send_files: int = 0
    send_bytes: int = 0
    devices: tuple[str, ...] = ()
    targets: int = 0
    requires: dict[str, str] = field(default_factory=dict)
    begin: str = ""
    pid: int | None = None
    touch: bool = True
    venv_pending: bool = False
    schema: int = 1

    @property
    def layout(self) -> Layout:
        return Layout(Path(self.spec.root))

    @property
    def checkpoints(self) -> Path:
        return checkpoints_folder(self.spec, self.layout.root)

    @property
    def release_there(self) -> bool:
        return self.spec.release is not None and not self.send_files and self._release.is_dir()

    @property
    def _release(self) -> Path:
        return self.layout.release(self.spec.release) if self.spec.release else self.layout.current

    def environment(self) -> dict[str, str]:
        """The environment that the launcher will have; what names a release that is not there yet is left out."""
        env = self.spec.env if self._release.is_dir() else {k: v for k, v in self.spec.env.items() if _R not in v}
        bare = replace(self.spec, argv=(), cwd="{root}", env=env)
        return {**command(bare, self.layout, 0, self.layout.run).env, "PYTHONDONTWRITEBYTECODE": "1"}

    def fill(self, text: str) -> str:
        """Placeholders, as far as they are known before an attempt."""
        places = (("{root}", self.spec.root), (_R, str(self._release)), ("{checkpoints}", str(self.checkpoints)))
        for name, value in places:
            text = text.replace(name, value)
        return text


_R = "{release}"


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


@dataclass
class Found:
    """All checks, what the trainer says it needs, and which form of config its interpreter reads."""

    checks: list[Check] = field(default_factory=list)
    needs: Needs = field(default_factory=Needs)
    config_name: str = "run.toml"


def run_checks(request: Request) -> Found:
    """All checks in the order in which a person would want to read them."""
    from dflash_ops.resident import checks, limits, meeting

    found = Found(checks.job(request) + checks.root(request) + checks.session(request))
    answered, python = checks.interpreter(request)
    found.checks += answered
    if request.bundled:
        found.config_name = "run.json" if python is not None and python < (3, 11) else "run.toml"
        # The trainer is asked only through an interpreter that runs; it also says how much memory and disk it takes.
        if any(c.status == "failed" for c in answered):
            found.checks.append(Check("config", "skipped", "not checked: the interpreter cannot run the trainer"))
        else:
            asked, found.needs = checks.trainer(request, found.config_name)
            found.checks += asked
    found.checks += checks.devices(request)
    found.checks += limits.gpu_memory(request, found.needs)
    found.checks += limits.ulimits(request)
    found.checks += checks.disk(request, found.needs)
    found.checks += checks.shared_memory(request, found.needs)
    found.checks += checks.memory(request, found.needs)
    found.checks += checks.checkpoints(request)
    found.checks += meeting.rendezvous(request)
    return found


def preflight(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a JSON request; with `needs_only` = name of the config, only the trainer's own check is run.

    Raises:
        ContractError: the request is not in the agreed form.
    """
    from dflash_ops.resident import checks

    request = from_dict(Request, data, "preflight request")
    if name := data.get("needs_only"):
        found = Found(*checks.trainer(request, str(name)), str(name))
    else:
        found = run_checks(request)
    return {
        "schema": 1,
        "checks": [to_dict(c) for c in found.checks],
        "needs": found.needs.said,
        "config_name": found.config_name,
    }


def main(args: list[str]) -> int:
    from dflash_ops.resident.receive import say
    from dflash_ops.resident.tmux import clean_environment

    clean_environment()
    raw = sys.stdin.buffer.readline()
    return say(lambda: preflight(json.loads(raw)))
