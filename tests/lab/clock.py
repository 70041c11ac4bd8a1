"""Building the clock fault's library (clock.c): there is no namespace for the wall clock."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from lab.needs import SBIN
from lab.shell import sh

#: Numbers of clock_gettime, statx and newfstatat; struct stat has its times at the same place on both.
NUMBERS = {"x86_64": (228, 332, 262), "aarch64": (113, 291, 79)}


def build(target: Path, seconds: int) -> None:
    """Write the library to `target`, for a clock that is `seconds` ahead (behind if negative).

    Raises:
        RuntimeError: no compiler, or another processor.
    """
    numbers = NUMBERS.get(platform.machine())
    compiler = next((c for c in ("gcc", "tcc", "cc") if shutil.which(c, path=SBIN)), None)
    if numbers is None or compiler is None:
        raise RuntimeError("the clock fault needs gcc or tcc (.ci/lab-packages installs one) on x86_64 or aarch64")
    clock, statx, fstatat = numbers
    values = {"OFFSET": f"({seconds}L)", "NR_CLOCK": clock, "NR_STATX": statx, "NR_FSTATAT": fstatat}
    defines = [f"-D{name}={value}" for name, value in values.items()]
    quiet = ["-fno-builtin", "-w"] if compiler != "tcc" else []
    source = str(Path(__file__).with_name("clock.c"))
    sh([compiler, "-shared", "-fPIC", "-nostdlib", *quiet, *defines, "-o", str(target), source])
