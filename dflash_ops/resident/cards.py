"""The machine's GPUs as nvidia-smi tells them, asked beside the loop.

The rules here: two short questions (the cards, who holds their memory) every few seconds, never more than one process,
never waited for; numbers that are older than OLD_S are not shown at all, and why is said.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dflash_ops.contracts import GpuHolder, GpuInfo, Process
from dflash_ops.resident import proc
from dflash_ops.resident.beside import Answer, Beside
from dflash_ops.supervise import nvidia

#: Seconds between two questions while somebody watches, and while nobody does or the last one failed: nvidia-smi
#: itself costs a good part of a second.
OFTEN_S, SELDOM_S = 5.0, 30.0

#: Seconds after which it is asked again who holds memory; only while somebody watches: it is a second nvidia-smi.
HELD_S = 15.0
UNWATCHED = "who holds memory is asked while somebody watches (status --watch)"

#: Seconds that nvidia-smi may take: without its persistence daemon it wakes every card first.
PATIENCE_S = 20.0

#: Seconds after which numbers are too old to be shown.
OLD_S = 60.0

#: Characters of a process's name.
NAME = 80

ABSENT = "nvidia-smi is not there: no GPU can be seen from here"


class Cards:
    """
    Args:
        clock: monotonic seconds. find: where a program is, as shutil.which.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, find: Callable[[str], str | None] = shutil.which
    ) -> None:
        self._clock = clock
        self._find = find
        self._beside = Beside(PATIENCE_S, clock)
        self._reasons = nvidia.REASONS[0]
        self._asking = ""
        self._often = False
        self._asked = float("-inf")  # when the last question, or pair of them, came to its end
        self._gpus: tuple[GpuInfo, ...] = ()
        self._at = self._held_at = float("-inf")
        self._fault, self._words, self._held_note = "not asked yet", "", ""
        self._names: dict[Process, tuple[str | None, str]] = {}

    def look(self, launcher: Process | None, *, often: bool) -> tuple[tuple[GpuInfo, ...], str]:
        """What is known now, and what is to be said of it; asks when it is time. Returns at once.

        Args:
            launcher: of the attempt whose workers are to be known by name. often: whether somebody watches.
        """
        self._often = often
        answer = self._beside.look()
        if answer is not None:
            self._take(answer, launcher)
        elif self._beside.pid is None:
            pause = OFTEN_S if often and not self._fault else SELDOM_S
            if self._clock() - self._asked >= pause:
                self._begin("cards")
        return self._shown()

    def close(self) -> None:
        self._beside.close()

    def _begin(self, what: str) -> None:
        program = self._find("nvidia-smi")
        if program is None:
            self._gpus = ()
            self._failed(ABSENT)
            return
        self._asking = what
        words = nvidia.ask_cards(self._reasons) if what == "cards" else nvidia.ask_holders()
        if (failed := self._beside.begin([program, *words])) is not None:
            self._failed(_why(failed))

    def _take(self, answer: Answer, launcher: Process | None) -> None:
        if self._asking == "cards":
            self._take_cards(answer)
            return
        self._asked = self._held_at = self._clock()
        # Who holds memory is one more thing to know: without it the cards still are what they are.
        if answer.rc != 0:
            self._gpus = nvidia.held(self._gpus, None)
            self._held_note = f"who holds memory: {_why(answer)}"
            return
        self._gpus = nvidia.held(self._gpus, self._named(nvidia.read_holders(answer.text), launcher))
        self._held_note = self._hidden()

    def _take_cards(self, answer: Answer) -> None:
        older = nvidia.older(self._reasons, answer.text) if answer.rc else None
        if older is not None:
            self._reasons = older
            self._begin("cards")
            return
        cards = nvidia.read_cards(answer.text)
        if answer.rc != 0 or not cards.gpus:
            self._failed(_why(answer, cards.words))
            return
        before = {gpu.uuid: gpu.holders for gpu in self._gpus}
        self._gpus = tuple(replace(gpu, holders=before.get(gpu.uuid)) for gpu in cards.gpus)
        self._asked = self._at = self._clock()
        self._fault, self._words = "", cards.words
        if self._often:
            if self._at - self._held_at >= HELD_S:
                self._begin("holders")
        elif self._at - self._held_at > OLD_S:
            self._gpus = nvidia.held(self._gpus, None)
            self._held_note = UNWATCHED

    def _failed(self, why: str) -> None:
        self._fault = why
        self._asked = self._clock()

    def _shown(self) -> tuple[tuple[GpuInfo, ...], str]:
        age = self._clock() - self._at
        waits = self._beside.seconds
        note = self._fault or "; ".join(filter(None, (self._words, self._held_note)))
        if waits > PATIENCE_S / 2:
            killed = " and cannot be killed: the driver hangs" if waits > PATIENCE_S + 2 else ""
            note = f"nvidia-smi (pid {self._beside.pid}) has not answered for {waits:.0f} s{killed}"
        if age > OLD_S:
            return (), note
        if self._gpus and age > SELDOM_S + PATIENCE_S / 2:
            note = "; ".join(filter(None, (note, f"these numbers are {age:.0f} s old")))
        return self._gpus, note

    # -- who holds memory

    def _named(
        self, holders: dict[str, tuple[GpuHolder, ...]], launcher: Process | None
    ) -> dict[str, tuple[GpuHolder, ...]]:
        names = {}
        pids = {holder.pid for all in holders.values() for holder in all}
        for pid in pids:
            found = proc.stat(pid)
            if found is not None:
                known = self._names.get(found.process)
                names[found.process] = known if known is not None and known[0] else _who(found, launcher)
        self._names = names
        by_pid = {process.pid: name for process, name in names.items()}
        # With numbers of another machine among them, one that we know is ours by its descent only.
        here = len(by_pid) == len(pids)

        def named(holder: GpuHolder) -> GpuHolder:
            worker, comm = by_pid.get(holder.pid, (None, ""))
            said = (Path(holder.name).name or holder.name)[:NAME]
            return replace(holder, worker=worker, name=(comm if here or worker else "") or said)

        return {uuid: tuple(map(named, all)) for uuid, all in holders.items()}

    def _hidden(self) -> str:
        """The driver counts processes as the host does; inside a container these numbers mean nothing."""
        pids = {h.pid for gpu in self._gpus for h in gpu.holders or ()}
        unseen = pids - {process.pid for process in self._names}
        if not unseen:
            return ""
        return (
            f"{len(unseen)} of {len(pids)} processes that hold GPU memory cannot be seen from here (another container?)"
        )


def _who(found: proc.Stat, launcher: Process | None) -> tuple[str | None, str]:
    """The worker that this process is, None where it is none of the launcher's, and its name."""
    if launcher is None or not _below(found, launcher):
        return None, found.comm
    if found.process == launcher:
        return "launcher", found.comm
    words = _words(found.pid, "cmdline")
    if "trainer.worker_main" in words and len(words) > (at := words.index("trainer.worker_main")) + 2:
        return words[at + 2], found.comm
    ranks = [word[5:] for word in _words(found.pid, "environ") if word.startswith("RANK=")]
    return (f"rank {ranks[0]}" if ranks else f"pid {found.pid}"), found.comm


def _below(found: proc.Stat, launcher: Process) -> bool:
    """Whether it descends from the launcher, or is of its session."""
    one: proc.Stat | None = found
    for _ in range(16):
        if one is None:
            return False
        if one.process == launcher or (one.session == launcher.pid and one.start >= launcher.start):
            return True
        one = proc.stat(one.ppid) if one.ppid else None
    return False


def _words(pid: int, what: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace").split("\0")
    except OSError:
        return []  # ended meanwhile, or another user's


def _why(answer: Answer, words: str = "") -> str:
    """Why nvidia-smi told nothing."""
    said = words or next((line.strip() for line in answer.text.splitlines() if line.strip()), "")
    said = f": {said[:300]}" if said else ""
    if answer.fault:
        return f"nvidia-smi {answer.fault}"
    return f"nvidia-smi failed with {answer.rc}{said}" if answer.rc else f"nvidia-smi told of no card{said}"
