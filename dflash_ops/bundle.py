"""Where the bundled trainer and playbooks lie: inside the wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

from dflash_ops.errors import ReleaseError

_PACKAGE = Path(__file__).resolve().parent


def bundled(name: str) -> Path:
    """Folder of a bundled part, `trainer` or `playbooks`.

    Raises:
        ReleaseError: neither place has it (a broken installation).
    """
    for place in (_PACKAGE / "_bundle" / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise ReleaseError(
        f"the bundled {name}/ is missing from this installation",
        str(_PACKAGE),
        "install dflash-ops anew from its wheel or checkout",
    )
