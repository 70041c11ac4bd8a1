"""The last average, in host memory: what drafters start from when one of them has died, and what a checkpoint is
written from.

Two buffers in a file without a name, like the ring's. One holds the last committed average; the drafters write the
next one into the other, which counts only once the launcher has written its header, at the commit. So a drafter that
dies while writing spoils nothing. A buffer that is being saved is not written to: then the next averaging waits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.errors import TrainerError
from trainer.ring import pin_memory, reserve
from trainer.state_layout import BUFFERS, HEADER, Kept, Place, StateLayout, wrapped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainer.optimizer import Masters


class Averages:
    """The launcher's side: it says which buffer counts, and never looks at a tensor.

    Args:
        layout: of the states. folder: a tmpfs (ring.dir).

    Raises:
        ConfigError: not enough room; says how much there is and how much is needed.
    """

    def __init__(self, layout: StateLayout, folder: str) -> None:
        self.layout = layout
        self.current: Kept | None = None
        self.previous: Kept | None = None
        self.descriptor = reserve(
            folder,
            layout.total_bytes,
            "the drafters' averages",
            f"{BUFFERS} states of {layout.buffer_bytes}, beside the ring",
            "another ring.dir (a larger tmpfs), fewer ring.slots, or a smaller drafter",
        )
        self._map = mmap.mmap(self.descriptor, layout.total_bytes)

    def begin(self, *, wipe: bool = True) -> int:
        """The buffer to write the next average into; what it held counts no more.

        Args:
            wipe: now. Of several nodes one may still need the average before the last one, until all have met for
                the next: then the drafter that writes it wipes the buffer first.
        """
        buffer = 0 if self.current is None else BUFFERS - 1 - self.current.buffer
        if wipe:
            self._wipe(buffer)
        return buffer

    def _wipe(self, buffer: int) -> None:
        self._header(buffer, bytes(HEADER))

    def valid(self) -> list[Kept]:
        """Averages that can be gone back to, the last one first."""
        found = [] if self.current is None else [self.current]
        if self.previous is not None and self.current is not None and self.previous.buffer != self.current.buffer:
            raw = os.pread(self.descriptor, HEADER, self.previous.buffer * self.layout.buffer_bytes)
            if raw == self.previous.encode():
                found.append(self.previous)
        return found

    def go_back(self, step: int) -> None:
        """The average of this step is the last one from now on; none, if it is not here."""
        found = next((kept for kept in self.valid() if kept.step == step), None)
        if found is None or found != self.current:
            for buffer in range(BUFFERS):
                if found is None or buffer != found.buffer:
                    self._wipe(buffer)
            self.current, self.previous = found, None

    def keep(self, step: int, batches: int, sums: Sequence[int]) -> None:
        """The commit: the buffer that `begin` gave is the last average from now on."""
        buffer = 0 if self.current is None else BUFFERS - 1 - self.current.buffer
        self.previous = self.current
        self.current = Kept(buffer, step, batches, tuple(sums))
        self._header(buffer, self.current.encode())

    def _header(self, buffer: int, raw: bytes) -> None:
        at = buffer * self.layout.buffer_bytes
        self._map[at : at + HEADER] = raw

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)


def read_header(descriptor: int, layout: StateLayout, buffer: int) -> Kept:
    """
    Raises:
        TrainerError: the buffer holds no state that counts.
    """
    try:
        kept = Kept.decode(buffer, os.pread(descriptor, HEADER, buffer * layout.buffer_bytes))
    except ValueError as error:
        raise _damaged(buffer, str(error)) from error
    if kept is None:
        raise _damaged(buffer, "it was never committed")
    return kept


def _damaged(buffer: int, why: str) -> TrainerError:
    return TrainerError(
        f"the average in memory cannot be used: {why}", f"buffer {buffer}", "resume from the last checkpoint"
    )


def region_name(number: int) -> str:
    return "weights" if number == 0 else f"moments {number - 1}"


class AverageMemory:
    """A drafter's side: writes its state into a buffer, or takes it from there.

    Args:
        descriptor: from the launcher. layout: the same as the launcher's. rank: this drafter's number.
        pin: page-lock the memory for CUDA, where possible.
    """

    def __init__(self, descriptor: int, layout: StateLayout, rank: int, *, pin: bool) -> None:
        import torch

        self.layout = layout
        self._descriptor = descriptor
        self._rank = rank
        self._map = mmap.mmap(descriptor, layout.total_bytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        if pin and self._mine():
            pin_memory(self._memory, "the averages are")

    def _mine(self) -> list[int]:
        """The regions that this drafter writes: the first one all that is common, each its own moments."""
        common = [0, 1] if self._rank == 0 else []
        return common if self.layout.moment_sets == 1 or self._rank == 0 else [1 + self._rank]

    def _places(self, buffer: int, region: int) -> list[Place]:
        lay = self.layout
        return list(lay.weights(buffer) if region == 0 else lay.moments(buffer, region - 1))

    def _view(self, place: Place) -> Tensor:
        import torch

        return self._memory[place.offset : place.offset + place.bytes].view(torch.float32).view(place.shape)

    def write(self, buffer: int, masters: Masters) -> Mapping[str, int]:
        """Copies what is this drafter's to write.

        Returns:
            number of the region, as text -> its sum, taken from the state itself and not from the copy.

        Raises:
            ValueError: a tensor is not finite; its name.
        """
        import torch

        sums = {}
        if self._rank == 0:
            os.pwrite(self._descriptor, bytes(HEADER), buffer * self.layout.buffer_bytes)
        for region in self._mine():
            parts = []
            for place in self._places(buffer, region):
                tensor = masters.tensor(place.kind, place.name)
                if not bool(torch.isfinite(tensor).all()):
                    raise ValueError(place.key)
                self._view(place).copy_(tensor, non_blocking=True)
                parts.append(_word_sum(tensor))
            sums[str(region)] = wrapped(sum(int(part.item()) for part in parts))
        return sums

    def read(self, buffer: int, masters: Masters) -> Kept:
        """Takes the whole state from a buffer.

        Raises:
            TrainerError: it is not what was committed.
        """
        kept = read_header(self._descriptor, self.layout, buffer)
        moments = 1 + (self._rank if self.layout.moment_sets > 1 else 0)
        for region in (0, moments):
            total = 0
            for place in self._places(buffer, region):
                tensor = self._view(place)
                total += int(_word_sum(tensor).item())
                masters.load(place.kind, place.name, tensor)
            if wrapped(total) != kept.sums[region]:
                raise _damaged(buffer, f"the sum of its {region_name(region)} is not the one of the commit")
        return kept


def _word_sum(tensor: Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)
