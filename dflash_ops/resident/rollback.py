"""`rollback`: back to what ran before: its release, its config, its checkpoints.

The rule here: what is gone back to is written down already (job.json of an attempt), so nothing is made up; checkpoints
that came since are set aside, whole, and those that were set aside come back by rename. Nothing is deleted.
"""

from __future__ import annotations

import argparse
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_ops.contracts import JobSpec, Layout, to_dict
from dflash_ops.errors import DeployError, DflashError, UsageError, did_you_mean
from dflash_ops.resident import attempts, journal, preflight, receive, releases, spec, start, stop
from dflash_ops.resident.answer import say
from dflash_ops.resident.aside import aside, move_some
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.begin import read_request
from dflash_ops.resident.files import run_lock, sync_folder
from dflash_ops.resident.records import activate
from dflash_ops.resident.tmux import clean_environment


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rollback", description="JSON on standard input")
    parser.add_argument("--root", required=True, type=Path)
    root = parser.parse_args(args).root.absolute()
    request = read_request("rollback")
    clean_environment()
    say(check(root, request) if request.get("check") else rollback(root, request))
    return 0


def choose(layout: Layout, request: dict[str, Any]) -> Attempt:
    """The attempt whose job is started again: `attempt`, or the newest of `release`, or of the previous release.

    Raises:
        UsageError: there is none.
    """
    number, release = request.get("attempt"), request.get("release")
    if number is None:
        listed = releases.listing(layout)
        wanted = release or listed["previous"]
        if wanted is None:
            raise UsageError(
                "there is nothing to go back to: no other release ran here before",
                str(layout.root),
                "dflash-ops releases lists what is there",
            )
        rows = [r for r in listed["releases"] if r["release"].startswith(wanted)]
        if len(rows) != 1:
            text = "no release" if not rows else f"{len(rows)} releases"
            there = ", ".join(r["release"] for r in listed["releases"]) or "none"
            near = did_you_mean(wanted, [r["release"] for r in listed["releases"]]) if not rows else ""
            raise UsageError(f"{text} there begin with {wanted!r}{near}", str(layout.releases), f"name one of: {there}")
        if not rows[0]["attempts"]:
            raise UsageError(
                f"release {rows[0]['release']} never ran, so its config is not known",
                str(layout.releases),
                "deploy it from its source",
            )
        number = rows[0]["attempts"][-1]
    found = attempts.read(layout, int(number))
    if found.spec is None:
        raise UsageError(
            f"the job of attempt {number} is not there whole" + "".join(f": {d}" for d in found.damaged),
            str(found.layout.job),
            "name another release: dflash-ops releases",
        )
    return found


def full_spec(found: Attempt, request: dict[str, Any]) -> JobSpec:
    """The attempt's job with the secrets that were left out of its file.

    Raises:
        UsageError: one of them was not sent.
    """
    assert found.spec is not None
    given = {str(k): str(v) for k, v in dict(request.get("secrets") or {}).items()}
    if missing := [name for name in found.spec.secret_env if name not in given]:
        raise UsageError(
            f"attempt {found.number} had secrets that are not known now: {', '.join(missing)}",
            "secret_env of the job",
            "name them in the inventory, and set them in your environment",
        )
    env = {**found.spec.env, **{name: given[name] for name in found.spec.secret_env}}
    actor = str(request.get("actor") or "operator")
    return replace(found.spec, env=env, actor=actor, reason=str(request.get("reason") or ""))


def check(root: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Whether the machine is ready for it: the checks of preflight, and who it is."""
    layout = Layout(root)
    found = choose(layout, request)
    job = full_spec(found, request)
    bundled = job.argv[1:4] == ("-m", "trainer", "run")
    last = attempts.last(layout)
    live = last is not None and last.launcher_alive and last.start is not None
    asked = preflight.Request(
        spec=job,
        interpreter=job.argv[0],
        bundled=bundled,
        config_toml=job.files.get("run.toml", ""),
        config_json=job.files.get("run.json", ""),
        begin="resume",
        pid=last.start.launcher.pid if live and last is not None and last.start is not None else None,
        **(dict(request.get("known") or {}) if bundled else {}),
    )
    if bundled and not asked.config_toml:
        asked = replace(asked, config_toml=asked.config_json)
    checked = preflight.run_checks(asked)
    return {
        "schema": 1,
        "attempt": found.number,
        "release": job.release,
        "overrides": job.overrides,
        "running": last.number if live and last is not None else None,
        "grace_s": job.grace_s,
        "checks": [to_dict(c) for c in checked.checks],
    }


def rollback(root: Path, request: dict[str, Any]) -> dict[str, Any]:
    """`{attempt | release, secrets, grace_s, since, restore, use, actor, reason, unless_same}`.

    `since`: checkpoints that came after the start of this attempt are set aside (null: none). `restore`: a folder that
    `aside` made, to be brought back. `unless_same`: nothing is done, and `{same: true}` said, where the newest attempt
    had the same release and config.

    Raises:
        UsageError, ReleaseError: nothing was touched. JobBusy, StartError, ...: as `stop` and `start`.
    """
    layout = Layout(root)
    found = choose(layout, request)
    job = full_spec(found, request)
    if job.release is not None and not layout.release(job.release).is_dir():
        raise DeployError(
            f"release {job.release}, to which to go back, is not there any more",
            str(layout.release(job.release)),
            "deploy it from its source",
        )
    last = attempts.last(layout)
    if request.get("unless_same") and last is not None and last.spec is not None and _same(last.spec, found.spec):
        return {"schema": 1, "same": True, "attempt": last.number}
    stopped: dict[str, Any] | None = None
    if last is not None and (last.launcher_alive or last.wrapper_alive):
        stopped = stop.stop(layout, request.get("grace_s"), job.reason or "rolled back", job.actor)
    restored = _checkpoints(layout, job, request)
    with run_lock(layout.lock, "rollback"):
        data = {
            "from": last.number if last is not None else None,
            "to": found.number,
            "release": job.release,
            "reason": job.reason,
            **restored,
        }
        journal.append(layout.journal, "rolled_back", actor=job.actor, data=data)
        if request.get("use"):
            receive.use(root, str(request["use"]), secrets.token_hex(4))
        if job.release is not None:
            activate(layout, job.release, job.actor)
    answer = start.start(root, job)
    return {**answer, "back_to": found.number, "release": job.release, "stopped": stopped, **restored}


def _same(one: JobSpec, other: JobSpec | None) -> bool:
    """Whether two attempts ran the same thing; why and by whom does not count."""
    return other is not None and replace(one, reason="", actor="") == replace(other, reason="", actor="")


def _checkpoints(layout: Layout, job: JobSpec, request: dict[str, Any]) -> dict[str, Any]:
    """The checkpoints as they were; `{set_aside, restored}`: folders, or null."""
    folder = Path(os.path.realpath(spec.checkpoints_folder(job, layout.root)))
    restore, since = request.get("restore"), request.get("since")
    if restore:
        there = Path(str(restore))
        if not there.is_dir():
            raise DflashError("the checkpoints that were set aside are not there any more", str(there), "look for them")
        moved = aside(layout, job.reason or "rolled back", job.actor, folder)
        if folder.is_dir():
            folder.rmdir()  # empty: aside has just made it, or nothing was ever saved
        there.rename(folder)
        sync_folder(folder.parent)
        return {"set_aside": moved["to"], "restored": str(there)}
    began = attempts.read(layout, int(since)).start if since is not None else None
    if began is None or not folder.is_dir():
        return {"set_aside": None, "restored": None}
    new = sorted(e.name for e in os.scandir(folder) if e.stat(follow_symlinks=False).st_mtime >= began.t)
    if not new:
        return {"set_aside": None, "restored": None}
    moved = move_some(layout, folder, new, job.reason or "rolled back", job.actor)
    return {"set_aside": moved["to"], "restored": None}
