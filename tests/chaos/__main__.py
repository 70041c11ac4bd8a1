"""`python -m chaos [NAME ...]`: every fault (or those named), a line each as it comes out; exit 1 where one failed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from chaos.faults import FAULTS
from chaos.scene import run
from dflash_ops.deploy.zipapp import build_resident

WIDTHS = (33, 9, 40, 26, 9)


def main(names: list[str]) -> int:
    known = [f.name for f in FAULTS]
    if unknown := [n for n in names if n not in known]:
        print(f"no fault is called {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    passed = failed = skipped = 0
    print(_row(("fault", "state", "diagnosis", "action", "outcome", "seconds")), flush=True)
    with tempfile.TemporaryDirectory(prefix="dflash-chaos-") as folder:
        made = Path(folder, "new.pyz")
        pyz = made.rename(made.with_name(f"{build_resident(made)}.pyz"))
        for fault in FAULTS:
            if names and fault.name not in names:
                continue
            seen = run(fault, pyz)
            kinds, actions = " ".join(dict.fromkeys(seen.kinds)) or "-", ", ".join(seen.actions) or "-"
            print(_row((fault.name, seen.state, kinds, actions, seen.outcome, f"{seen.seconds:.1f}")), flush=True)
            if seen.skipped:
                skipped += 1
                print(f"    skipped: {seen.skipped}", flush=True)
            elif seen.wrong:
                failed += 1
                print(f"    FAILED: {seen.wrong}", flush=True)
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, (*WIDTHS, 0), strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
