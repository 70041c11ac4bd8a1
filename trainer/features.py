"""Features on disk: a target's tapped layers of every sample, written once and trained from without the target.

    features.json          what they are of (target, data, taps, dtype, cut) and the list of whole shards; written last
    shard-00000.safetensors  a tensor [tokens, k*H] for each sample, named by the sample's id; a CRC-32 of each in the
                             header's metadata

A shard's header depends on the plan alone, so its batches may be written in any order by any thread. Everything here
reads and compares; it imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.errors import ConfigError, DataError
from trainer.ring import ITEM_BYTES
from trainer.target_files import read_header

if TYPE_CHECKING:
    from trainer.config import RunConfig
    from trainer.data import DataIndex
    from trainer.drafter_config import DrafterConfig
    from trainer.plan import Plan
    from trainer.target_files import TargetFacts

SCHEMA = 1
MANIFEST = "features.json"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SHARD = re.compile(r"\.?shard-\d{5,}\.safetensors(\.partial)?")
#: Of each tensor of the target this much goes into its fingerprint: enough to tell two trainings of one architecture
#: apart, and read in a second where all of its weights would take minutes.
_FINGERPRINT_BYTES = 4096
#: Keys of config.json that say who wrote it, not what the target computes.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
_AGAIN = "write them anew: python -m trainer features --config RUN.toml --out ANOTHER_FOLDER"


@dataclass(frozen=True)
class Identity:
    """What features are of. Two runs may share them only if all of it is equal.

    Attributes:
        target: fingerprint of its folder. data_sha256: of the data file. samples: accepted ones.
        layer_ids: taps, in order. width: k*H. dtype: torch's name. max_length: where samples were cut, in tokens.
    """

    target: str
    data_sha256: str
    samples: int
    layer_ids: tuple[int, ...]
    width: int
    dtype: str
    max_length: int

    def differences(self, wanted: Identity) -> list[str]:
        """What is another thing in the features (self) than in the run that wants them, for people."""
        names = {
            "layer_ids": "tapped layers",
            "width": "width",
            "dtype": "dtype",
            "target": "target's fingerprint",
            "data_sha256": "sha256 of the data",
            "samples": "number of samples",
            "max_length": "data.max_length",
        }
        ours, theirs = asdict(self), asdict(wanted)

        def shown(value: Any) -> str:
            return value[:12] if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)

        return [
            f"{text} {shown(ours[name])}, the run has {shown(theirs[name])}"
            for name, text in names.items()
            if ours[name] != theirs[name]
        ]


@dataclass(frozen=True)
class Shard:
    """A whole shard: file name, bytes, sha256 of all of them, samples in it, and its batches first..end - 1."""

    name: str
    bytes: int
    sha256: str
    samples: int
    first: int
    end: int


@dataclass(frozen=True)
class ShardPlan:
    """A shard that is to be written: its batches, and the samples with their tokens in file order."""

    number: int
    first: int
    end: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"shard-{self.number:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """features.json. `division` is what the shards' borders depend on; only the writer cares."""

    identity: Identity
    division: Mapping[str, Any]
    complete: bool
    shards: tuple[Shard, ...] = field(default=())

    def save(self, folder: Path) -> None:
        """Beside, durable, renamed."""
        from trainer.checkpoint import sync

        beside = folder / f".{MANIFEST}.partial"
        raw = {
            "schema": SCHEMA,
            "kind": "features",
            "complete": self.complete,
            "identity": asdict(self.identity),
            "division": dict(self.division),
            "shards": [asdict(s) for s in self.shards],
        }
        beside.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        sync(beside)
        beside.replace(folder / MANIFEST)
        sync(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """What a features folder says of itself; None if it says nothing.

    Raises:
        DataError: features.json is damaged, or of a newer trainer.
    """
    file = folder / MANIFEST
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{MANIFEST} cannot be read: {error}", str(file), _AGAIN) from error
    try:
        if int(raw["schema"]) > SCHEMA:
            raise DataError(f"schema {raw['schema']} is newer than this trainer", str(file), "use its release")
        found = dict(raw["identity"])
        identity = Identity(**{**found, "layer_ids": tuple(int(i) for i in found["layer_ids"])})
        shards = tuple(Shard(**entry) for entry in raw["shards"])
        return Manifest(identity, dict(raw["division"]), bool(raw["complete"]), shards)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{MANIFEST} lacks what it should hold: {error}", str(file), _AGAIN) from error


def check_features(folder: Path, wanted: Identity) -> Manifest:
    """That a run may train from these features; sizes of files are looked at, contents are not read.

    Raises:
        DataError: there are none, not all of them, other ones (each difference is named), or a shard is cut or gone.
    """
    where = f"features.path = {folder}"
    manifest = read_manifest(folder)
    if manifest is None:
        what = f"no {MANIFEST}: these are no features" if folder.is_dir() else "there is no such folder"
        raise DataError(what, where, "write them first: python -m trainer features --config RUN.toml --out FOLDER")
    differ = manifest.identity.differences(wanted)
    if differ:
        raise DataError(f"these features are of something else: {'; '.join(differ)}", where, _AGAIN)
    if not manifest.complete:
        done = sum(s.samples for s in manifest.shards)
        raise DataError(
            f"the features are not all there: {done} of {wanted.samples} samples",
            where,
            "go on writing them: python -m trainer features with the same --config and --out",
        )
    for shard in manifest.shards:
        file = folder / shard.name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DataError(f"{shard.name} cannot be read: {error.strerror}", str(file), mend(folder)) from error
        if size != shard.bytes:
            raise DataError(f"{shard.name} has {size} bytes, the manifest says {shard.bytes}", str(file), mend(folder))
    return manifest


def mend(folder: Path) -> str:
    """What to do about a damaged shard."""
    again = f"python -m trainer features --config RUN.toml --out {folder}"
    return f"remove that file and call `{again}` again: it writes what is missing"


def identity_of(target: TargetFacts, drafter: DrafterConfig, index: DataIndex, config: RunConfig) -> Identity:
    """What features of this run would be of."""
    return Identity(
        target=fingerprint(target.path),
        data_sha256=index.sha256,
        samples=len(index.ids),
        layer_ids=drafter.target_layer_ids,
        width=len(drafter.target_layer_ids) * drafter.hidden_size,
        dtype=config.dtype,
        max_length=config.data.max_length,
    )


def fingerprint(folder: str | Path) -> str:
    """A target's identity, 64 hex digits: its config, and of each tensor name, dtype, shape and 4 KiB of its middle.

    The same for a copy of the folder, and for the same tensors in other files.

    Raises:
        ConfigError: weights that cannot be read.
    """
    digest = hashlib.sha256()
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        kept = {k: v for k, v in config.items() if k not in _VOLATILE}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        tensors = sorted(entry for file in Path(folder).glob("*.safetensors") for entry in _tensors(file))
        for name, dtype, shape, file, start, size in tensors:
            digest.update(f"\0{name}\0{dtype}\0{shape}\0".encode())
            with open(file, "rb") as opened:
                opened.seek(start + max(0, (size - _FINGERPRINT_BYTES) // 2))
                digest.update(opened.read(min(size, _FINGERPRINT_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the target's fingerprint cannot be taken: {error}", str(folder), "copy the target's folder again, whole"
        ) from error
    return digest.hexdigest()


def _tensors(file: Path) -> Iterator[tuple[str, str, str, str, int, int]]:
    header, start = read_header(file)
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield name, str(entry["dtype"]), str(entry["shape"]), str(file), start + first, end - first


# ---- shards


def shard_header(plan: ShardPlan, width: int, dtype: str, checksums: Sequence[int] | None = None) -> bytes:
    """A shard's first bytes; as long with checksums as with none, so that they can be filled in at the end."""
    item = ITEM_BYTES[dtype]
    crc = "".join(f"{c:08x}" for c in (checksums or [0] * len(plan.ids)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "crc32": crc}}
    offset = 0
    for sample, length in zip(plan.ids, plan.lengths, strict=True):
        size = length * width * item
        header[str(sample)] = {
            "dtype": _DTYPES[dtype], "shape": [length, width], "data_offsets": [offset, offset + size],
        }  # fmt: skip
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def shard_bytes(plan: ShardPlan, width: int, dtype: str) -> int:
    """Size of its file."""
    return len(shard_header(plan, width, dtype)) + sum(plan.lengths) * width * ITEM_BYTES[dtype]


def divide(plan: Plan, lengths: Mapping[int, int], row_bytes: int, limit: int) -> list[ShardPlan]:
    """The first epoch's batches in shards of at most `limit` bytes (a single batch may be larger).

    Args:
        plan: of a run from its beginning. lengths: tokens of each sample. row_bytes: of one token's features.
    """
    shards: list[ShardPlan] = []
    first, size = 0, 0
    ids: list[int] = []
    total = plan.total(1)
    for number in range(total):
        samples = plan.batch(number).sample_ids
        more = sum(lengths[i] for i in samples) * row_bytes
        if ids and size + more > limit:
            shards.append(ShardPlan(len(shards), first, number, tuple(ids), tuple(lengths[i] for i in ids)))
            first, ids, size = number, [], 0
        ids += samples
        size += more
    shards.append(ShardPlan(len(shards), first, total, tuple(ids), tuple(lengths[i] for i in ids)))
    return shards


class Place(NamedTuple):
    """Where a sample's features lie: number of the shard in the manifest, byte offset, tokens, CRC-32."""

    shard: int
    offset: int
    tokens: int
    crc32: int


def read_places(folder: Path, manifest: Manifest) -> dict[int, Place]:
    """Every sample's place, from the shards' headers.

    Raises:
        DataError: a shard whose header is not what the manifest promises.
    """
    identity = manifest.identity
    places: dict[int, Place] = {}
    for number, shard in enumerate(manifest.shards):
        file = folder / shard.name
        try:
            header, start = read_header(file)
            crc = header.pop("__metadata__")["crc32"]
            if len(header) != shard.samples or len(crc) != 8 * len(header):
                raise ValueError(f"it lists {len(header)} samples, the manifest {shard.samples}")
            for at, (name, entry) in enumerate(header.items()):
                tokens, width = entry["shape"]
                if width != identity.width or entry["dtype"] != _DTYPES[identity.dtype]:
                    raise ValueError(f"sample {name} is [{tokens}, {width}] of {entry['dtype']}")
                offset, checksum = start + int(entry["data_offsets"][0]), int(crc[8 * at : 8 * at + 8], 16)
                places[int(name)] = Place(number, offset, int(tokens), checksum)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{shard.name} is damaged: {error}", str(file), mend(folder)) from error
    return places


def sweep(folder: Path, keep: Sequence[Shard]) -> None:
    """Removes shards that no manifest knows: half-written ones of a killed run."""
    known = {shard.name for shard in keep}
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in known:
            path.unlink()
