"""Slots of shared host memory through which features travel from targets to drafters.

The memory is a file without a name (O_TMPFILE) on a tmpfs, reserved in full at the start: it cannot run out later, and
it is gone with the last process that holds it, whatever ends them. Workers get its descriptor over their socket. No
lock and no state lies in it: which slot holds what is known to the launcher alone. Creating it needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 64
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class RingLayout:
    """Where things lie in a slot: lengths [B] int32, ids [B, S] int32, mask [B, S] uint8, features [B, S, width].

    Attributes:
        slots: how many. batch: B. length: the longest S; shorter batches use the front of each area.
        width: k*H. dtype: of the features, torch's name.
    """

    slots: int
    batch: int
    length: int
    width: int
    dtype: str

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Byte offsets in a slot of lengths, ids, mask and features, and the slot's size, all 64-byte aligned."""
        rows = self.batch * self.length
        ids = _align(4 * self.batch)
        mask = ids + _align(4 * rows)
        features = mask + _align(rows)
        return 0, ids, mask, features, features + _align(rows * self.width * ITEM_BYTES[self.dtype])

    @property
    def slot_bytes(self) -> int:
        return self.offsets[4]

    @property
    def total_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RingLayout:
        return cls(**raw)


def create_ring(layout: RingLayout, folder: str) -> int:
    """Reserves the ring's memory.

    Returns:
        A descriptor; the file has no name.

    Raises:
        ConfigError: not enough room, or no such folder; says how many bytes are there and how many are needed.
    """
    return reserve(
        folder,
        layout.total_bytes,
        "the ring",
        f"{layout.slots} slots of {layout.slot_bytes}",
        "fewer ring.slots, a smaller data.batch_size or data.max_length, or another ring.dir (a larger tmpfs)",
    )


def reserve(folder: str, size: int, what: str, made_of: str, next_step: str) -> int:
    """Memory that processes share: a file without a name on a tmpfs, all of it taken now.

    Args:
        folder: ring.dir. size: bytes. what, made_of, next_step: for the message, such as "the ring".

    Returns:
        A descriptor.

    Raises:
        ConfigError: not enough room, or no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise _refused(folder, size, what, made_of, next_step, error) from error
        try:  # file systems without O_TMPFILE: a name that lives for a moment
            descriptor, name = tempfile.mkstemp(prefix="dflash-", dir=folder)
            Path(name).unlink()
        except OSError as second:
            raise _refused(folder, size, what, made_of, next_step, second) from second
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise _refused(folder, size, what, made_of, next_step, error) from error
    return descriptor


def room(folder: str | Path) -> int:
    """Bytes that are free for us on the folder's file system.

    Raises:
        OSError: no such folder.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _refused(folder: str, size: int, what: str, made_of: str, next_step: str, error: OSError) -> ConfigError:
    try:
        there = f"{room(folder)} bytes are free there, "
    except OSError:
        there = ""
    return ConfigError(
        f"{what} cannot be made: {error.strerror}; {there}{size} bytes are needed ({made_of})",
        f"ring.dir = {folder}",
        next_step,
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The very memory of a contiguous CPU tensor, of any dtype."""
    import torch

    raw: Any = tensor.view(torch.uint8).numpy()
    return memoryview(raw).cast("B")


@dataclass(frozen=True)
class Slot:
    """Views into one slot for one batch shape; writing to them is writing to the ring."""

    lengths: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    features: Tensor

    def checksum(self, batch: int) -> int:
        """CRC-32 of the batch's number and of all that the slot holds of it."""
        crc = zlib.crc32(batch.to_bytes(8, "little"))
        for tensor in (self.lengths, self.input_ids, self.loss_mask, self.features):
            crc = zlib.crc32(bytes_of(tensor), crc)
        return crc


class Ring:
    """The mapped ring in a worker.

    Args:
        descriptor: from the launcher; may be closed afterwards. layout: the same as the launcher's.
        pin: page-lock the memory for CUDA, where possible.
    """

    def __init__(self, descriptor: int, layout: RingLayout, *, pin: bool) -> None:
        import torch

        self.layout = layout
        self._map = mmap.mmap(descriptor, layout.total_bytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self.pinned = pin and pin_memory(self._memory, "the ring is")

    def slot(self, number: int, length: int) -> Slot:
        """Views for a batch of `length` padded positions."""
        import torch

        lay = self.layout
        lengths, ids, mask, features, size = lay.offsets
        memory = self._memory[number * size : (number + 1) * size]
        rows = lay.batch * length
        item = ITEM_BYTES[lay.dtype]
        return Slot(
            lengths=memory[lengths : lengths + 4 * lay.batch].view(torch.int32),
            input_ids=memory[ids : ids + 4 * rows].view(torch.int32).view(lay.batch, length),
            loss_mask=memory[mask : mask + rows].view(lay.batch, length),
            features=memory[features : features + rows * lay.width * item]
            .view(self._dtype)
            .view(lay.batch, length, lay.width),
        )


def pin_memory(memory: Tensor, what: str) -> bool:
    """Page-locks shared memory: copies to and from a GPU then run beside its work. False if the driver refuses."""
    import torch

    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) == 0:
        return True
    print(f"{what} not pinned (cudaHostRegister: {status}): copies will be slower", flush=True)
    with contextlib.suppress(RuntimeError):
        # The refusal stays behind as the last error; the next kernel would be blamed for it. This one takes it.
        torch.zeros(1, device="cuda")
    return False
