"""Crash triage: any mess of text -> the kind, the line that names the cause, and what to do. Pure.

`diagnose(sources, playbooks, context)` is the one entry; a `Triage` keeps compiled playbooks for many texts.
Stages: scan (bytes -> the lines worth reading) -> clean -> wraps -> prefix -> parse -> match -> judge -> report.
"""

from dflash_ops.triage.diagnose import Triage, diagnose
from dflash_ops.triage.playbook import Kind, Playbooks, compile_playbooks
from dflash_ops.triage.types import SOURCE_KINDS, Source

__all__ = ["SOURCE_KINDS", "Kind", "Playbooks", "Source", "Triage", "compile_playbooks", "diagnose"]
