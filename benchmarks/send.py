"""What sending a tree costs, through ssh and pct: against `rsync -az` over the same way, and against `cat` in bulk.

    sudo python benchmarks/send.py            # needs the lab of tests/lab: root, Linux, rsync
    sudo python benchmarks/send.py --rounds 15 --bulk 2000

Both sides of each ratio do the same work in turns on one lab in one run, in changing order, both over a connection
that is open (ssh by ControlMaster): look at the tree here, find out what the other side lacks, send that, put it in
place. For rsync that is one `rsync` with its `ssh`; for ours one exec in this process, as a deploy has it up by then.
300 files, and the same 300 with 3 changed, must be no slower than rsync; one large file must reach 0.8 of what `cat`
reaches over our own connection, once it was hashed here (the ratio with that is said as well). The ratios are of
medians; minima stand beside them. Exit code 1 if one is missed.

Ours checks every file by hash when it arrives, also those that it takes from the release before, and all of it appears
by one rename; rsync changes files in place, and believes size and time. Both write into memory (tmpfs), so that the way
is measured and not the disk: on a disk a whole release is 300 new files, where rsync changes 3.

A deploy asks more than rsync, in the same exec: how the job is, what is installed, which environment there is. `deploy`
is ours with all that, `question` what it adds (medians of 3 changed).
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

from dflash_ops.deploy.operation import PROBE  # noqa: E402
from dflash_ops.deploy.release import Built, build  # noqa: E402
from dflash_ops.deploy.transfer import RECEIVE, Pack, build_pack, question, send  # noqa: E402
from dflash_ops.hosts.base import Host  # noqa: E402
from dflash_ops.hosts.factory import Hosts  # noqa: E402
from dflash_ops.inventory import load  # noqa: E402

#: Most that sending may take as a share of rsync, and least that bulk must reach as a share of cat.
RSYNC_RATIO = 1.0
BULK_RATIO = 0.8
WHAT = ("new", "changed")
PYTHON = "/usr/bin/python3"

#: Root of the job that was deployed before: its resident serves all.
FIRST = "/dev/shm/bench/first"


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
    """One exec: what is missing is asked (`PROBE`: and all that a deploy asks), and only that travels."""

    def __init__(self, host: Host, pack: Pack, folder: Path, root: str, module: str = RECEIVE) -> None:
        self.host, self.pack, self.folder, self.root, self.module = host, pack, folder, root, module

    def __call__(self) -> None:
        self.send(build(self.folder, max_bytes=1 << 40))

    def send(self, built: Built) -> None:
        asked = (
            {"ask": built.manifest} if self.module == RECEIVE else {"release": built.manifest, "resident": self.pack.id}
        )
        request = {"root": self.root, **asked}
        with question(self.host, PYTHON, self.pack, self.module, request, built, root=self.root, at=FIRST) as upload:
            upload.send(only=upload.said["lacking"])


def install(host: Host) -> Pack:
    """The resident, which a job's first deploy brings."""
    pack = build_pack()
    send(host, PYTHON, pack, FIRST, None, resident=True)
    return pack


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
    took: dict[str, list[float]] = {}
    with Hosts(inventory) as hosts:
        host = hosts["ct200"]
        pack = install(host)
        quiet([str(shell), "x", "true"])
        for number in range(rounds + 1):
            there = f"/dev/shm/bench/{number}"
            host.run(["mkdir", "-p", f"{there}/rsync"], deadline=30)
            rsync = ["rsync", "-az", "--delete", "-e", str(shell), f"{folder}/", f"200:{there}/rsync/"]
            cases: list[tuple[str, Callable[[], object]]] = [
                ("rsync", lambda argv=rsync: quiet(argv)),  # type: ignore[misc]
                ("ours", Ours(host, pack, folder, f"{there}/ours")),
                ("deploy", Ours(host, pack, folder, f"{there}/deploy", PROBE)),
            ]
            cases = cases[number % 3 :] + cases[: number % 3]
            for what in WHAT:
                for name, case in cases:
                    seconds = timed(case)
                    if number:  # the first round does not count
                        took.setdefault(f"{name} {what}", []).append(seconds)
                change(folder, 3, number)
        bulk = measure_bulk(lab, host, shell, megabytes, pack)
    middle = {name: statistics.median(values) for name, values in took.items()}
    least = {name: min(values) for name, values in took.items()}
    return {
        "seconds": {name: round(value, 3) for name, value in middle.items()},
        "least seconds": {name: round(value, 3) for name, value in least.items()},
        "question": round(middle["deploy changed"] - middle["ours changed"], 3),
        **{f"deploy {what}": round(middle[f"deploy {what}"] / middle[f"rsync {what}"], 2) for what in WHAT},
        **{f"{what}, least": round(least[f"ours {what}"] / least[f"rsync {what}"], 2) for what in WHAT},
        **{what: round(middle[f"ours {what}"] / middle[f"rsync {what}"], 2) for what in WHAT},
        **bulk,
    }


def measure_bulk(lab: Lab, host: Host, shell: Path, megabytes: int, pack: Pack) -> dict[str, object]:
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
    seconds = {"cat": [], "ssh cat": [], "hashing here": [], "ours": []}  # type: dict[str, list[float]]
    for _ in range(2):
        seconds["cat"].append(timed(cat))
        seconds["ssh cat"].append(timed(ssh_cat))
        begin = time.perf_counter()
        built = build(folder, max_bytes=1 << 40)
        seconds["hashing here"].append(time.perf_counter() - begin)
        us = Ours(host, pack, folder, "/dev/shm/bench/bulk")
        seconds["ours"].append(timed(lambda u=us, b=built: u.send(b)))
        host.run(["rm", "-rf", "/dev/shm/bench/bulk", "/dev/shm/bench/cat"], deadline=60)
    best = {name: min(values) for name, values in seconds.items()}
    shutil.rmtree(folder)
    return {
        "bulk_mb": megabytes,
        "bulk_mb_s": {name: round(megabytes / value) for name, value in best.items()},
        "bulk": round(best["cat"] / best["ours"], 2),
        "bulk with hashing here": round(best["cat"] / (best["ours"] + best["hashing here"]), 2),
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
