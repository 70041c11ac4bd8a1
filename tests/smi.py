"""A stand-in for nvidia-smi: answers what it is asked from a JSON file beside it, and can be told to misbehave.

    smi = Smi(tmp_path / "bin")           # put that folder first in PATH
    smi.cards = [card(0, **{"utilization.gpu": "97"}), card(1)]
    smi.holders = [("GPU-0", 4211, "60000", "python3")]
    smi.unknown = ["clocks_event_reasons.active"]      # columns that this driver does not know
    smi.does = "hang" | "garbage" | "flood" | "fail" | ""
    smi.write()

`asked()` counts its calls. What the columns say is text, as nvidia-smi prints it (`[N/A]`, `ERR!`, ...).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCRIPT = r"""#!{python} -ES
import json, pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
with open(folder / "asked", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\n")
s = json.loads((folder / "says.json").read_text())
if s["does"] == "hang" or s["does"] == "hang on holders" and "compute" in sys.argv[1]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if s["does"] == "garbage":
    sys.stdout.buffer.write(bytes(range(256)) * 20 + b"\n0\n,,,\n-1, x\n")
    sys.exit(0)
if s["does"] == "flood":
    sys.stdout.write("0, flood, " * 1_000_000)
    sys.exit(0)
if s["does"] == "fail":
    print("Failed to initialize NVML: Driver/library version mismatch")
    sys.exit(18)
if s["does"] == "none":
    print("No devices were found")
    sys.exit(6)
if sys.argv[1].startswith("--query-compute-apps="):
    print("\n".join(", ".join(map(str, h)) for h in s["holders"]))
    sys.exit(0)
columns = sys.argv[1].partition("=")[2].split(",")
for column in columns:
    if column in s["unknown"]:
        print(f'Field "{column}" is not a valid field to query.\n')
        sys.exit(2)
for card in s["cards"]:
    print(", ".join(card.get(column, "[N/A]") for column in columns))
"""


def card(index: int, **changes: str) -> dict[str, str]:
    """A healthy card's columns."""
    return {
        "index": str(index),
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}",
        "utilization.gpu": "97",
        "memory.used": "61440",
        "memory.total": "143771",
        "temperature.gpu": "64",
        "power.draw": "612.40",
        "power.limit": "700.00",
        "ecc.errors.corrected.volatile.total": "0",
        "ecc.errors.uncorrected.volatile.total": "0",
        "clocks_event_reasons.active": "0x0000000000000000",
        "clocks_throttle_reasons.active": "0x0000000000000000",
        **changes,
    }


@dataclass
class Smi:
    folder: Path
    cards: list[dict[str, str]] = field(default_factory=lambda: [card(0), card(1)])
    holders: list[tuple[str, int, str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    does: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.program.write_text(SCRIPT.replace("{python}", sys.executable))
        self.program.chmod(0o755)
        self.write()

    @property
    def program(self) -> Path:
        return self.folder / "nvidia-smi"

    def write(self) -> None:
        """Let it say this from now on."""
        said = {k: v for k, v in asdict(self).items() if k != "folder"}
        beside = self.folder / "says.tmp"
        beside.write_text(json.dumps(said))
        beside.replace(self.folder / "says.json")

    def asked(self) -> list[str]:
        """The calls so far."""
        log = self.folder / "asked"
        return log.read_text().splitlines() if log.exists() else []
