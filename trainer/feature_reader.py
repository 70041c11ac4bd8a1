"""A reader process: takes a target's place in the pipeline and fills ring slots with features from disk.

It gets the same messages as a target. Features go from the page cache into the ring in one copy (`preadv`; of a mapped
file an unreadable sector would be a SIGBUS, here it is an error with a name). A sample's CRC-32 is checked the first
time that this process reads it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.channel import Channel
from trainer.config import parse_config
from trainer.data import Sample
from trainer.errors import ConfigError, DataError
from trainer.features import mend, read_manifest, read_places
from trainer.ring import RingLayout, Slot, bytes_of
from trainer.stopwatch import Stopwatch
from trainer.target_worker import Fill, prepare_process, serve

#: Shards that are open at one time: there may be more of them than a process may have files.
OPEN_FILES = 128


class FeatureReader:
    """Samples' features by id.

    Args:
        folder: with features.json, complete.

    Raises:
        DataError: it is not what a reader needs.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest is None or not manifest.complete:
            raise DataError("the features are gone, or not all there", str(folder), mend(folder))
        self._folder, self._shards = folder, manifest.shards
        self._places = read_places(folder, manifest)
        self._files: dict[int, int] = {}  # shard -> descriptor, the one opened first in front
        self._checked: set[int] = set()

    def read(self, sample: int, rows: Tensor) -> None:
        """Fills rows [tokens, k*H], contiguous.

        Raises:
            DataError: other tokens than were written, or a damaged shard.
        """
        place = self._places.get(sample)
        if place is None or place.tokens != rows.shape[0]:
            have = "none" if place is None else str(place.tokens)
            raise DataError(
                f"sample {sample} has {rows.shape[0]} tokens, its features {have}",
                str(self._folder),
                mend(self._folder),
            )
        file = self._folder / self._shards[place.shard].name
        memory = bytes_of(rows)
        got = 0
        try:
            descriptor = self._open(place.shard)
            while got < len(memory):
                read = os.preadv(descriptor, [memory[got:]], place.offset + got)
                if read == 0:
                    break
                got += read
        except OSError as error:
            raise DataError(f"{file.name} cannot be read: {error.strerror}", str(file), mend(self._folder)) from error
        if got != len(memory) or (sample not in self._checked and zlib.crc32(memory) != place.crc32):
            raise DataError(f"{file.name} is damaged in the features of sample {sample}", str(file), mend(self._folder))
        self._checked.add(sample)

    def _open(self, shard: int) -> int:
        if shard not in self._files:
            while len(self._files) >= OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[shard] = os.open(self._folder / self._shards[shard].name, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]

    def close(self) -> None:
        """Its files; the process's end does it, too."""
        while self._files:
            os.close(self._files.popitem()[1])


def run_reader(channel: Channel, setup: Mapping[str, Any]) -> None:
    """Serves until the launcher says exit.

    Raises:
        DataError: data or features changed, or are damaged. PeerGone: the launcher died.
    """
    config = parse_config(setup["config"], "setup")
    device = prepare_process("cpu", config.workers.threads)

    def open_features(_: RingLayout) -> Fill:
        if config.features.path is None:
            raise ConfigError("a reader without features", "features.path", "report this as a fault")
        features = FeatureReader(Path(config.features.path))

        def fill(slot: Slot, samples: Sequence[Sample], watch: Stopwatch) -> None:
            watch.lap("compute")
            _fill_features(slot, [(s.id, len(s.input_ids)) for s in samples], features)

        return fill

    serve(channel, config, setup, device, open_features)


def _fill_features(slot: Slot, samples: list[tuple[int, int]], features: FeatureReader) -> None:
    """Real positions from disk, zeros behind them: no real position ever reads a padded one."""
    for row in range(slot.features.shape[0]):
        sample, tokens = samples[row] if row < len(samples) else (-1, 0)
        if tokens:
            features.read(sample, slot.features[row, :tokens])
        slot.features[row, tokens:].zero_()
