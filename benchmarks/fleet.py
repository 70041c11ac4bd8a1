"""One `status --all` over many hosts: how long the whole pass takes against its slowest answer.

    python benchmarks/fleet.py
    python benchmarks/fleet.py --hosts 200 --slow 20 --away 10 --deadline 3

Simulated hosts: most answer within 0.1 s, some take a second or two, some hang until their deadline. The goal: one
pass within twice the slowest answer. Exit code 1 if not, or if others than those that hang count as unreachable.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_ops.cli.fleet import look_all, show
from dflash_ops.contracts import Progress, Snapshot, State, dumps
from dflash_ops.errors import DeadlineExceeded
from dflash_ops.fleet.jobs import Filters, counts
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.factory import Hosts
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import load

GOAL = 2.0


class Far(FakeHost):
    """Answers after `after_s`, or never: then its deadline ends the call, as every Host does."""

    def __init__(self, name: str, after_s: float) -> None:
        super().__init__(name)
        self._after_s = after_s
        snapshot = Snapshot(name, 1000.0, State.STEPPING, 900.0, attempt=1, progress=Progress(t=1000.0, step=5))
        self.answer("sh", "-c", ..., stdout=f"1000 file\n{dumps(snapshot)}\n")

    def run(self, argv: Any, *, deadline: float, **more: Any) -> Completed:
        time.sleep(min(self._after_s, deadline))
        if self._after_s > deadline:
            raise DeadlineExceeded("no answer", f"host {self.name}")
        return super().run(argv, deadline=deadline, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--slow", type=int, default=20, help="answer after 1 to 2 s")
    parser.add_argument("--away", type=int, default=10, help="hang until the deadline")
    parser.add_argument("--deadline", type=float, default=3.0)
    options = parser.parse_args()
    dice = random.Random(1)
    delays = [dice.uniform(1.0, 2.0) for _ in range(options.slow)] + [1e9] * options.away
    delays += [dice.uniform(0.02, 0.1) for _ in range(options.hosts - len(delays))]
    dice.shuffle(delays)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inventory.toml"
        file.write_text(
            "".join(
                f'[hosts.h{n}]\nkind = "ssh"\naddress = "192.0.2.{n % 250 + 1}"\n[jobs.j{n}]\nhost = "h{n}"\n'
                f'root = "/srv/j{n}"\nsession = "j{n}"\ncommand = ["true"]\n'
                for n in range(options.hosts)
            )
        )
        loaded = load(file)
    Hosts._make = lambda self, name: Far(name, delays[int(name[1:])])  # type: ignore[method-assign]
    jobs = list(loaded.jobs.values())
    began = time.monotonic()
    seen = look_all(loaded, jobs, deadline=options.deadline, quiet=True)
    took = time.monotonic() - began
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        show(seen, Filters(), order="trouble", jobs=jobs, nodes=False)
    drawn = time.monotonic() - began
    slowest = min(options.deadline, max(delays))
    ratio = took / slowest
    print(
        f"{options.hosts} hosts, {options.slow} slow, {options.away} silent for {options.deadline:g} s: {counts(seen)}"
    )
    print(f"pass {took:.2f} s, slowest answer {slowest:.2f} s: ratio {ratio:.2f} (goal {GOAL:g}); table {drawn:.2f} s")
    return 0 if ratio <= GOAL and counts(seen).get("unreachable", 0) == options.away else 1


if __name__ == "__main__":
    sys.exit(main())
