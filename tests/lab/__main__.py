"""`python -m lab up | down [ID] | list`: a lab for a person to play with."""

from __future__ import annotations

import sys
from pathlib import Path

from lab import owner
from lab.build import Lab, demolish, opened, sweep
from lab.needs import missing


def packages() -> Path | None:
    """The tests' own packages, where the containers' Python is of the same version."""
    for path in map(Path, sys.path):
        if (path / "torch").is_dir() and path.is_absolute():
            return path
    return None


def up() -> int:
    lab = Lab.up(keep=True, packages=packages())
    home = lab.operator_home
    print(
        f"lab {lab.token.id} is up: pve1 192.0.2.11 (ct200, ct201), pve2 192.0.2.12 (ct300), inner 192.0.2.13 behind it"
    )
    print(f"inventory: {lab.inventory}")
    print("\nbe its operator (a shell in the lab's network, with its ssh keys):")
    print("  " + " ".join([*home.wrap(["bash"])]))
    print("\nthen, for example:")
    print("  dflash-ops doctor demo; dflash-ops deploy demo; dflash-ops status demo; dflash-ops logs -f demo")
    print(f"  ssh -F {home.ssh / 'config'} 192.0.2.11 pct list")
    print(f"\nfaults, from another shell (in {Path(__file__).resolve().parent.parent}):")
    print(f"  ip -n {lab.machines['pve1'].namespace} link set to-op down      # and up again")
    print(f"  echo 0.3 > {lab.machines['pve1'].folder}/knobs/delay           # a pct as slow as a real one; rm it")
    print(f"\nmake lab-down takes it away, and all else that `make lab` made. Its files: {lab.folder}")
    return 0


def down(wanted: str | None) -> int:
    sweep()
    kept = [(f, t) for f, t in owner.labs() if (t.owner is None if wanted is None else t.id == wanted)]
    for folder, token in kept:
        demolish(folder, token)
        print(f"lab {token.id} is gone")
    if wanted is not None and not kept:
        print(f"there is no lab {wanted} in {owner.base()}", file=sys.stderr)
        return 1
    if not kept:
        print(f"no lab is up (in {owner.base()})")
    return 0


def show() -> int:
    for folder, token in owner.labs():
        whose = "kept until lab-down" if token.owner is None else f"of process {token.owner[0]}"
        print(f"{token.id}  {whose}{', orphaned' if token.orphaned else ''}  {folder}")
    return 0


def main(argv: list[str]) -> int:
    if (why := missing()) is not None:
        print(f"lab: {why}", file=sys.stderr)
        return 1
    if argv[:1] == ["up"]:
        return up()
    if argv[:1] == ["down"]:
        return down(argv[1] if len(argv) > 1 else None)
    if argv[:1] == ["list"]:
        return show()
    if argv[:1] == ["run"] and len(argv) > 2:  # run ID MACHINE-or-CONTAINER COMMAND...
        lab = opened(argv[1])
        where = argv[2]
        print(
            lab.containers[int(where)].exec(argv[3:]) if where.isdigit() else lab.machines[where].run(argv[3:]), end=""
        )
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
