"""Doctor's way: this machine's own Python, then the job's host by one `Host.run`, then judgement of the facts."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_ops.deploy.spec import REQUIRES
from dflash_ops.doctor import judge
from dflash_ops.doctor.report import Check, Report, Section, fail, ok, warn
from dflash_ops.errors import CommandFailed, ContractError, DflashError, HostError, InventoryError
from dflash_ops.hosts.base import Host
from dflash_ops.inventory import Inventory, Job
from dflash_ops.resident.machine import in_range
from dflash_ops.supervise import nvidia

#: What this side needs (the dependencies of pyproject.toml, held equal by a test).
PACKAGES: Mapping[str, str] = {
    "paramiko": ">=4.0",
    "typer": ">=0.16",
    "rich": ">=14.0",
    "libtmux": ">=0.46",
    "pathspec": ">=0.12.1",
}

#: The argument of `python -c`: reads a length, then that much code, and runs it. One line of ASCII, whatever the way.
LOADER = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"

#: Seconds for the import of torch and transformers from a cold disk.
IMPORT_S = 120.0

#: Seconds for nvidia-smi: a driver in trouble hangs, and then it hangs for good.
GPU_S = 20.0

#: Seconds for the whole probe: its own limits (tmux 2 x 10, nvidia-smi, imports) and some for the way.
PROBE_S = IMPORT_S + GPU_S + 40.0


def this_machine() -> Section:
    """Python and packages of the operator's side."""
    have = ".".join(map(str, sys.version_info[:3]))
    checks = [
        ok("python", f"Python {have} ({sys.executable})")
        if sys.version_info >= (3, 11)
        else fail(
            "python", f"Python {have}, dflash-ops needs 3.11 or newer", "install a newer Python and dflash-ops on it"
        )
    ]
    good: list[str] = []
    for name, wanted in PACKAGES.items():
        install = f"{sys.executable} -m pip install '{name}{wanted}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(fail("packages", f"{name} is not installed", install))
            continue
        if in_range(version, wanted):
            good.append(f"{name} {version}")
        else:
            checks.append(fail("packages", f"{name} {version} is outside {wanted}", install))
    if good:
        checks.append(ok("packages", ", ".join(good)))
    return Section("this machine", tuple(checks))


#: Where a job's programs are looked for unless its `env` says so: the launcher's environment, not that of who calls.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def request_of(job: Job) -> dict[str, Any]:
    """What the probe is told of a job; of its environment only where its programs are looked for, no secrets."""
    return {
        "path": job.env.get("PATH", PATH).replace("{root}", job.root),
        "root": job.root,
        "session": job.session,
        "socket": job.socket,
        "interpreter": job.interpreter if job.trainer is not None else (job.command or ("",))[0],
        "imports": list(REQUIRES) if job.trainer is not None else [],
        "import_s": IMPORT_S,
        "gpu": list(nvidia.ask_cards("")),
        "gpu_s": GPU_S,
    }


def probe(host: Host, python: str, job: Job) -> dict[str, Any]:
    """Facts of the machine, by one command.

    Raises:
        HostError: the way to it. CommandFailed: no python there, or it failed. ContractError: no answer in our form.
    """
    code = Path(__file__).with_name("probe.py").read_bytes()
    stdin = b"%d\n" % len(code) + code + json.dumps(request_of(job)).encode() + b"\n"
    done = host.run([python, "-c", LOADER], deadline=PROBE_S, stdin=stdin)
    if done.rc == 127:
        raise CommandFailed(
            f"there is no {python}",
            f"host {host.name}",
            "install Python 3.10 or newer there, or correct `python` of the host in the inventory",
            rc=127,
        )
    if done.rc != 0:
        said = done.error_text.strip().splitlines()[-1:] or [f"exit code {done.rc}"]
        raise CommandFailed(
            f"{python} does not run our probe: {said[0]}",
            f"host {host.name}",
            "correct `python` of the host in the inventory: Python 3.10 or newer",
            rc=done.rc,
            stderr=done.error_text,
        )
    try:
        facts = json.loads(done.text.strip().rpartition("\n")[2])
    except ValueError:
        facts = None
    if isinstance(facts, dict) and isinstance(gpus := facts.get("gpus"), dict):
        facts["gpus"] = {"list": _cards(gpus.get("said")), "why": gpus.get("why")}
    if not isinstance(facts, dict):
        raise ContractError(
            f"{python} did not answer as a Python does: {done.text.strip()[:100]!r}",
            f"host {host.name}",
            "correct `python` of the host in the inventory",
        )
    return facts


def _cards(said: Any) -> list[dict[str, Any]] | None:
    """What nvidia-smi said, as `judge` wants it; None: nothing."""
    if not isinstance(said, str):
        return None
    found = nvidia.read_cards(said).gpus
    return [{"index": g.index, "name": g.name, "total": g.mem_total, "used": g.mem_used} for g in found]


def host_sections(inventory: Inventory, job: Job, host: Host) -> tuple[Section, ...]:
    """The job's host and the job itself; where the host cannot be asked, that is the one failing check."""
    place = f"host {job.host}"
    try:
        facts = probe(host, inventory.hosts[job.host].python, job)
    except HostError as error:
        return (Section(place, (_as_check("reach", error),)),)
    except (CommandFailed, ContractError) as error:
        return (Section(place, (_as_check("python", error),)),)
    try:
        return (
            Section(place, judge.machine(facts, job)),
            Section(f"job {job.name}" + (f", {job.label}" if job.node else ""), judge.job(facts, job, REQUIRES)),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        broken = ContractError(f"its answer is not in the agreed form: {error!r}", place, "run dflash-ops doctor again")
        return (Section(place, (_as_check("python", broken),)),)


def examine(inventory: Inventory, job: Job, host: Host, environ: Mapping[str, str]) -> Report:
    """Everything about one job."""
    sections = [this_machine(), *host_sections(inventory, job, host)]
    extra = [*_source(job), *_secrets(job, environ)]
    if extra:
        sections.append(Section("inventory", tuple(extra)))
    return Report(tuple(sections), job=job.name, host=job.host)


def merged(reports: Sequence[Report], job: Job) -> Report:
    """The reports of a job's nodes as one: each place once."""
    sections: dict[str, Section] = {}
    for report in reports:
        for section in report.sections:
            sections.setdefault(section.place, section)
    return Report(tuple(sections.values()), job=job.name, host=", ".join(job.hosts))


def without_job(error: DflashError) -> Report:
    """This machine alone, where no job can be looked at; `error` says why."""
    several = getattr(error, "errors", (error,))
    return Report((this_machine(), Section("inventory", tuple(_as_check("inventory", one) for one in several))))


def _source(job: Job) -> list[Check]:
    if job.source is None:
        return []
    if Path(job.source).is_dir():
        return [ok("source", f"{job.source} is there")]
    return [fail("source", f"{job.source} is no folder", f"correct `source` of job {job.name}")]


def _secrets(job: Job, environ: Mapping[str, str]) -> list[Check]:
    """Whether secrets can be had now; never their values."""
    if not job.secret_env:
        return []
    try:
        found = job.secrets(environ)
    except InventoryError as error:
        return [_as_check("secrets", error)]
    empty = [name for name, value in found.items() if not value]
    if empty:
        return [warn("secrets", f"{', '.join(empty)} is empty", "set it before you deploy")]
    return [ok("secrets", ", ".join(found))]


def _as_check(name: str, error: DflashError) -> Check:
    place = f" ({error.where})" if isinstance(error, InventoryError) and error.where else ""
    return fail(name, f"{error.what}{place}", error.next)
