"""What the way costs: a status against a bare `ssh host pct exec ID -- tmux capture-pane`, bulk against `cat`.

    sudo python benchmarks/wire.py            # needs the lab of tests/lab: root, Linux
    sudo python benchmarks/wire.py --delay 0.3 --rounds 15 --bulk 500

Both sides of each ratio are measured in turns on one lab in one run, both over a connection that is open (ssh by
ControlMaster); a status may cost 1.2 times the bare command, bulk must reach 0.8 of `cat`. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from lab import Lab, missing  # noqa: E402

from dflash_ops.client import JobClient  # noqa: E402
from dflash_ops.hosts.factory import Hosts  # noqa: E402
from dflash_ops.inventory import load  # noqa: E402

PIECE = bytes(range(256)) * 1024

#: Most that a status may cost, and least that bulk must reach, as ratios.
STATUS_RATIO = 1.2
BULK_RATIO = 0.8


def turns(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case, one of each in turn, after one round that does not count."""
    took: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            if number:
                took[name].append(time.perf_counter() - began)
    return took


def quiet(argv: list[str], stdin: Path | None = None) -> bytes:
    """Run it; its output. A failure is an error, or the numbers would mean nothing."""
    with stdin.open("rb") if stdin is not None else contextlib.nullcontext(subprocess.DEVNULL) as source:
        return subprocess.run(argv, stdin=source, capture_output=True, check=True, timeout=120).stdout


def measure(lab: Lab, rounds: int, megabytes: int) -> dict[str, object]:
    inventory = load(lab.inventory)
    job = inventory.job("demo")
    subprocess.run([sys.executable, "-m", "dflash_ops.cli.main", "deploy", "demo"], check=True, timeout=300)
    control = lab.folder / "control"
    config = lab.operator_home.ssh / "config"
    ssh = ["ssh", "-F", str(config), "-o", "ControlMaster=auto", "-o", "ControlPersist=600"]
    ssh += ["-o", f"ControlPath={control}", "root@192.0.2.11"]
    pct = [*ssh, "pct", "exec", "200", "--"]
    with Hosts(inventory) as hosts:
        host = hosts[job.host]
        client = JobClient(host, job, inventory.host_of(job).python)
        capture = ["tmux", "-L", job.socket, "capture-pane", "-p", "-t", job.session]
        seen = client.snapshot()
        if not seen.reachable or b"step" not in quiet([*pct, *capture]):
            raise RuntimeError("the demo job does not run")
        calls = len(lab.calls())
        client.snapshot()
        execs = len(lab.calls()) - calls
        status = turns(
            {
                "bare": lambda: quiet([*pct, *capture]),
                "status": client.snapshot,
                "same command": lambda: host.run(capture, deadline=30),
            },
            rounds,
        )
        file = lab.folder / "bulk"
        with file.open("wb") as out:
            for _ in range(4 * megabytes):
                out.write(PIECE)

        def pieces() -> Iterator[bytes]:
            with file.open("rb") as source:
                while piece := source.read(1 << 18):
                    yield piece

        def checked(size: bytes) -> None:
            if int(size) != megabytes << 20:
                raise RuntimeError(f"{size!r} bytes arrived")

        count = ["wc", "-c"]
        bulk = turns(
            {
                "cat": lambda: checked(quiet([*pct, *count], file)),
                "ours": lambda: checked(host.run(count, deadline=300, stdin=pieces()).stdout),
            },
            3,
        )
    quiet([*ssh, "-O", "exit"])
    subprocess.run([sys.executable, "-m", "dflash_ops.cli.main", "stop", "demo"], check=True, timeout=100)
    middle = {name: statistics.median(seconds) for name, seconds in {**status, **bulk}.items()}
    return {
        "bare_ms": middle["bare"] * 1000,
        "status_ms": middle["status"] * 1000,
        "same_command_ms": middle["same command"] * 1000,
        "status_ratio": middle["status"] / middle["bare"],
        "execs_a_status": execs,
        "cat_mb_s": megabytes * 1.048576 / middle["cat"],
        "ours_mb_s": megabytes * 1.048576 / middle["ours"],
        "bulk_ratio": middle["cat"] / middle["ours"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--bulk", type=int, default=300, help="MiB")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each pct call takes longer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (why := missing()) is not None:
        print(why, file=sys.stderr)
        return 2
    with Lab.up() as lab, lab.operator(), lab.faults.pct_delay("pve1", options.delay):
        said = measure(lab, options.rounds, options.bulk)
    fine = float(str(said["status_ratio"])) <= STATUS_RATIO and float(str(said["bulk_ratio"])) >= BULK_RATIO
    if options.json:
        print(json.dumps({**said, "ok": fine}))
    else:
        for name, value in said.items():
            print(f"{name:18} {value:10.2f}" if isinstance(value, float) else f"{name:18} {value!s:>10}")
        print("within bounds" if fine else f"out of bounds: status <= {STATUS_RATIO}, bulk >= {BULK_RATIO}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
