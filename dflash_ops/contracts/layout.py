"""Names of files and folders under a job's root (docs/contracts.md, Folders). No I/O here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AttemptLayout:
    path: Path

    @property
    def start(self) -> Path:
        return self.path / "start.json"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def run_toml(self) -> Path:
        return self.path / "run.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plan(self) -> Path:
        return self.path / "plan.jsonl"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"


@dataclass(frozen=True)
class Layout:
    root: Path

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    def release(self, id: str) -> Path:
        return self.releases / id

    @property
    def current(self) -> Path:
        return self.root / "current"

    @property
    def resident(self) -> Path:
        return self.root / "resident"

    @property
    def resident_current(self) -> Path:
        return self.resident / "current.pyz"

    @property
    def aside(self) -> Path:
        return self.root / "checkpoints.aside"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def job(self) -> Path:
        return self.run / "job.json"

    @property
    def snapshot(self) -> Path:
        return self.run / "snapshot.json"

    @property
    def curves(self) -> Path:
        return self.run / "curves.json"

    @property
    def watched(self) -> Path:
        return self.run / "watched"

    @property
    def journal(self) -> Path:
        return self.run / "journal.jsonl"

    @property
    def lock(self) -> Path:
        return self.run / "lock"

    @property
    def lease(self) -> Path:
        return self.run / "lease"

    @property
    def overlay(self) -> Path:
        return self.run / "overlay.json"

    @property
    def learned(self) -> Path:
        return self.run / "learned.json"

    @property
    def resident_pid(self) -> Path:
        return self.run / "resident.json"

    @property
    def resident_lock(self) -> Path:
        return self.run / "resident.lock"

    @property
    def resident_log(self) -> Path:
        return self.run / "resident.log"

    @property
    def attempts(self) -> Path:
        return self.run / "attempts"

    def attempt(self, number: int) -> AttemptLayout:
        return AttemptLayout(self.attempts / str(number))
