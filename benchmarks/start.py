"""How long the commands take that a person types most, beside the bare start of the interpreter.

    python benchmarks/start.py [--rounds 15]

`dflash-ops --help` and one TAB, `status` of a job on this machine that was never deployed (one exec of sh), and
`python -m trainer --help`, each beside `python -c pass`, in turn, so that what else the machine does hits both. Goal:
--help within 0.25 s. What is imported is told, too: of rich, paramiko, libtmux, torch and transformers --help has none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("rich", "paramiko", "libtmux", "torch", "transformers", "tomllib", "asyncio")
INVENTORY = """
[hosts.here]
kind = "local"
[jobs.main]
host = "here"
root = "{folder}/root"
command = ["true"]
"""


def seconds(words: list[str], env: dict[str, str]) -> float:
    begin = time.perf_counter()
    quiet = subprocess.DEVNULL
    # One that fails early would look fast.
    subprocess.run([sys.executable, *words], env=env, stdout=quiet, stderr=quiet, check=True, timeout=60)
    return time.perf_counter() - begin


def imported(words: list[str], env: dict[str, str]) -> list[str]:
    """Which heavy packages a command imports."""
    code = (
        "import sys\nfrom dflash_ops.cli.main import run\n"
        f"try:\n    run({words!r})\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    return [word.strip("' ") for word in done.stderr.splitlines()[-1].strip("[]").split(",") if word.strip("' ")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of which the fastest counts (default 15)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "inventory.toml").write_text(INVENTORY.format(folder=folder))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "DFLASH_INVENTORY": f"{folder}/inventory.toml"}
        tab = {"_DFLASH_OPS_COMPLETE": "complete_bash", "COMP_WORDS": "dflash-ops status ", "COMP_CWORD": "2"}
        ops = ["-m", "dflash_ops.cli.main"]
        cases = {
            "python -c pass": (["-c", "pass"], env),
            "dflash-ops --help": ([*ops, "--help"], env),
            "TAB after status": (ops, {**env, **tab}),
            "dflash-ops status": ([*ops, "status"], env),
            "dflash-ops status --json": ([*ops, "status", "--json"], env),
            "python -m trainer --help": (["-m", "trainer", "--help"], env),
        }
        best = dict.fromkeys(cases, float("inf"))
        for _ in range(args.rounds):
            for name, (words, where) in cases.items():
                best[name] = min(best[name], seconds(words, where))
        bare = best["python -c pass"]
        for name, took in best.items():
            print(f"{name:<26} {took:.3f} s  {took / bare:5.1f} x python -c pass")
        for words in (["--help"], ["status"], ["status", "--json"]):
            print(
                f"dflash-ops {' '.join(words)} imports of the heavy ones: {', '.join(imported(words, env)) or 'none'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
