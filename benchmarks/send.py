"""What sending a tree costs, through ssh and pct: against `rsync -az` over the same way, and against `cat` in bulk.

    sudo python benchmarks/send.py            # needs the lab of tests/lab: root, Linux, rsync
    sudo python benchmarks/send.py --rounds 15 --bulk 2000

Both sides of each ratio are measured in turns on one lab in one run, both over a connection that is open (ssh by
ControlMaster). 300 files, and the same 300 with 3 changed, must be no slower than rsync; one large file must reach 0.8
of what `cat` reaches over our own connection. Exit code 1 if a ratio is missed.

`ours` is a deploy's stage `send`. What is there already is a part of the deploy's first question, which is asked
whatever is sent; asked alone it costs `question`. Ours checks every file by hash
when it arrives, also those that it takes from the release before, and all of it appears by one rename; rsync changes
files in place, and believes size and time. Both write into memory (tmpfs), so that the way is measured and not the
disk: on a disk a whole release is 300 new files, where rsync changes 3.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from lab import Lab, missing  # noqa: E402

from dflash_ops.deploy.release import Built, build  # noqa: E402
from dflash_ops.deploy.transfer import build_pack, lacking, send  # noqa: E402
from dflash_ops.hosts.base import Host  # noqa: E402
from dflash_ops.hosts.factory import Hosts  # noqa: E402
from dflash_ops.inventory import load  # noqa: E402

#: Most that sending may take as a share of rsync, and least that bulk must reach as a share of cat.
RSYNC_RATIO = 1.0
BULK_RATIO = 0.8
PYTHON = "/usr/bin/python3"


def tree(folder: Path, files: int = 300) -> None:
    """Source code as it is: small files in some folders, 1.5 MB in all for 300."""
    rng = random.Random(1)
    for number in range(files):
        path = folder / f"p{number % 20}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        words = " ".join(f"name_{rng.randrange(5000)}" for _ in range(rng.randint(50, 900)))
        path.write_text(words + "\n")


def change(folder: Path, count: int, mark: object) -> None:
    for path in sorted(folder.rglob("*.py"))[:count]:
        path.write_text(f"# {mark}\n" + path.read_text().split("\n", 1)[1])


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Ours:
    """As a deploy does it: what is missing is asked (with its first question), only that travels."""

    def __init__(self, host: Host, root: str, resident: str) -> None:
        self.host, self.root, self.pack, self.at = host, root, build_pack(), resident

    def ask(self, built: Built) -> list[int]:
        return lacking(self.host, PYTHON, self.pack, self.root, built, at=self.at)

    def send(self, built: Built, only: list[int]) -> None:
        send(self.host, PYTHON, self.pack, self.root, built, only=only, at=self.at)


def install(host: Host) -> str:
    """The resident, which a job's first deploy brings; where it lies."""
    root = "/dev/shm/bench/first"
    send(host, PYTHON, build_pack(), root, None, resident=True)
    return f"{root}/resident/{build_pack().id}.pyz"


def quiet(argv: list[str]) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=600)


def measure(lab: Lab, rounds: int, megabytes: int) -> dict[str, object]:
    inventory = load(lab.inventory)
    shell = lab.folder / "through-pct"
    options = f"-o ControlMaster=auto -o ControlPersist=600 -o ControlPath={lab.folder}/control"
    ssh = f"ssh -F {lab.operator_home.ssh}/config {options}"
    shell.write_text(f'#!/bin/sh\nshift\nexec {ssh} root@192.0.2.11 pct exec 200 -- "$@"\n')
    shell.chmod(0o755)
    folder = lab.folder / "tree"
    tree(folder)
    took: dict[str, list[float]] = {
        k: [] for k in ("rsync new", "ours new", "rsync changed", "ours changed", "question")
    }
    with Hosts(inventory) as hosts:
        host = hosts["ct200"]
        resident = install(host)
        host.run(["true"], deadline=30)
        quiet([str(shell), "x", "true"])
        for number in range(rounds + 1):
            there = f"/dev/shm/bench/{number}"
            host.run(["mkdir", "-p", f"{there}/rsync"], deadline=30)

            def rsync(there: str = there) -> None:
                quiet(["rsync", "-az", "--delete", "-e", str(shell), f"{folder}/", f"200:{there}/rsync/"])

            us = Ours(host, f"{there}/ours", resident)
            now = {"rsync new": timed(rsync)}
            built = build(folder)
            only = us.ask(built)
            now |= {"ours new": timed(lambda u=us, b=built, o=only: u.send(b, o))}
            change(folder, 3, number)
            now |= {"rsync changed": timed(rsync)}
            built = build(folder)
            began = time.perf_counter()
            only = us.ask(built)
            now |= {"question": time.perf_counter() - began}
            now |= {"ours changed": timed(lambda u=us, b=built, o=only: u.send(b, o))}
            if number:  # the first round does not count
                for name, seconds in now.items():
                    took[name].append(seconds)
        bulk = measure_bulk(lab, host, shell, megabytes, resident)
    median = {name: statistics.median(values) for name, values in took.items()}
    return {
        "seconds": {name: round(value, 3) for name, value in median.items()},
        "new": round(median["ours new"] / median["rsync new"], 2),
        "changed": round(median["ours changed"] / median["rsync changed"], 2),
        **bulk,
    }


def measure_bulk(lab: Lab, host: Host, shell: Path, megabytes: int, resident: str) -> dict[str, object]:
    """One file of noise: ours (hashed, in a release) against `cat` through our own connection and through ssh's."""
    folder = lab.folder / "bulk"
    folder.mkdir()
    file = folder / "noise.bin"
    block = os.urandom(1 << 20)
    with file.open("wb") as out:
        for number in range(megabytes):
            out.write(number.to_bytes(8, "little") + block[8:])

    def pieces() -> Iterator[bytes]:
        with file.open("rb") as source:
            while piece := source.read(1 << 18):
                yield piece

    def cat() -> None:
        done = host.run(["sh", "-c", "cat > /dev/shm/bench/cat"], deadline=600, stdin=pieces())
        assert done.rc == 0, done.error_text

    def ssh_cat() -> None:
        with file.open("rb") as source:
            subprocess.run(
                [str(shell), "x", "sh", "-c", "'cat > /dev/shm/bench/cat'"], stdin=source, check=True, timeout=600,
                capture_output=True,
            )  # fmt: skip

    host.run(["mkdir", "-p", "/dev/shm/bench"], deadline=30)
    seconds = {"cat": [], "ssh cat": [], "ours": []}  # type: dict[str, list[float]]
    for _ in range(2):
        seconds["cat"].append(timed(cat))
        seconds["ssh cat"].append(timed(ssh_cat))
        us = Ours(host, "/dev/shm/bench/bulk", resident)
        built = build(folder, max_bytes=1 << 40)
        only = us.ask(built)
        seconds["ours"].append(timed(lambda u=us, b=built, o=only: u.send(b, o)))
        host.run(["rm", "-rf", "/dev/shm/bench/bulk", "/dev/shm/bench/cat"], deadline=60)
    best = {name: min(values) for name, values in seconds.items()}
    shutil.rmtree(folder)
    return {
        "bulk_mb": megabytes,
        "bulk_mb_s": {name: round(megabytes / value) for name, value in best.items()},
        "bulk": round(best["cat"] / best["ours"], 2),
        "bulk_of_ssh": round(best["ssh cat"] / best["ours"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bulk", type=int, default=500, metavar="MB", help="size of the large file")
    args = parser.parse_args()
    if (why := missing()) is not None:
        print(f"no lab here: {why}", file=sys.stderr)
        return 1
    with Lab.up() as lab, lab.operator():
        said = measure(lab, args.rounds, args.bulk)
    print(json.dumps(said, indent=1))
    fine = said["new"] <= RSYNC_RATIO and said["changed"] <= RSYNC_RATIO and said["bulk"] >= BULK_RATIO  # type: ignore[operator]
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
