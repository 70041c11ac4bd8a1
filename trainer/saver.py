"""`python -m trainer.saver`: writes one checkpoint from the launcher's memory, in a process of its own, so that neither
the launcher's loop nor the training waits for a disk. Imports no torch.

It reads the buffer that the launcher named, checks it against the sums of the commit, writes and fsyncs the tensor
files and the manifest into the hidden folder, and says on the descriptor that it was given what came of it: one JSON
line. The launcher alone gives the checkpoint its name. It ends with its parent.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import sys
from pathlib import Path

from trainer.averages import read_header, region_name
from trainer.checkpoint import WEIGHTS, seal
from trainer.errors import TrainerError
from trainer.state_layout import Place, StateLayout, wrapped
from trainer.tensor_files import moments_file, write_tensor_file
from trainer.worker_main import die_with


def save(descriptor: int, layout: StateLayout, buffer: int, beside: Path) -> None:
    """Writes the state in a buffer into a folder from `Store.begin`, and seals it.

    Raises:
        TrainerError: the buffer is not what was committed. OSError: no room, or the folder cannot be written.
    """
    import numpy

    kept = read_header(descriptor, layout, buffer)
    # Never closed: an error's traceback still holds views of it, and the process ends anyway.
    memory = memoryview(mmap.mmap(descriptor, layout.total_bytes, prot=mmap.PROT_READ))
    for number, (offset, size) in enumerate(layout.regions(buffer)):
        words = numpy.frombuffer(memory, dtype="<i4", count=size // 4, offset=offset)
        total = wrapped(int(words.sum(dtype="int64")))
        del words
        if total != kept.sums[number]:
            raise TrainerError(
                f"the average in memory is damaged: the sum of its {region_name(number)} is not the commit's",
                f"step {kept.step}",
                "resume from the last checkpoint",
            )

    def write(name: str, places: list[Place]) -> dict[str, object]:
        views = {p.key: (p.shape, memory[p.offset : p.offset + p.bytes]) for p in places}
        return write_tensor_file(beside / name, views)

    files = {WEIGHTS: write(WEIGHTS, list(layout.weights(buffer)))}
    for number in range(layout.moment_sets):
        files[moments_file(number)] = write(moments_file(number), list(layout.moments(buffer, number)))
    seal(beside, files)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="trainer.saver")
    for name in ("parent", "answer", "averages", "buffer"):
        parser.add_argument(name, type=int)
    parser.add_argument("layout")
    parser.add_argument("beside", type=Path)
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    layout = StateLayout.from_dict(json.loads(arguments.layout))
    try:
        save(arguments.averages, layout, arguments.buffer, arguments.beside)
        answer: dict[str, object] = {"ok": True}
    except TrainerError as error:
        answer = {"ok": False, "what": error.what}
    except OSError as error:
        answer = {"ok": False, "what": f"{error.strerror or error}: {error.filename or arguments.beside}"}
    os.write(arguments.answer, json.dumps(answer).encode() + b"\n")
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
