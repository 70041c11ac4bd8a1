"""The zipapp's modules, compiled once by the Python that runs them: importing them from source takes longer than most
questions that they answer.

Beside `resident/<id>.pyz` lies `<id>.<cache tag>.zip`, which is looked into first (deploy/boot.py, deploy/zipapp.py).
It is only a faster form: without it, or with another Python, the zipapp's sources are used.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
import zipfile
from importlib.util import MAGIC_NUMBER


def place_beside(pyz: str) -> str:
    """Where the compiled form of `<id>.pyz` lies, for this Python."""
    return f"{pyz[:-3]}{sys.implementation.cache_tag}.zip"


def write_compiled(path: str, pyz: bytes) -> None:
    """Compile all modules of a zipapp into a new file, onto the disk, with the data that lies beside them.

    Raises:
        OSError: it cannot be written.
    """
    with zipfile.ZipFile(io.BytesIO(pyz)) as source, open(path, "xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target:
            for name in source.namelist():
                if name.endswith(".py") and name != "__main__.py":
                    code = compile(source.read(name), name, "exec", dont_inherit=True)
                    # no flags, time and size of a source: there is none in this archive to compare with
                    target.writestr(f"{name}c", MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
                elif name.endswith(".json"):
                    target.writestr(name, source.read(name))  # a module that comes from here looks for its data here
        file.flush()
        os.fsync(file.fileno())
