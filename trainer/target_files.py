"""What a target's folder says without loading it: sizes, where embedding and head are, whether the weights are whole.

Reads config.json and the headers of safetensors files (u64 length, then JSON), and imports no torch: half-copied
folders, weights of another target and formats that cannot be read are found before a worker starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TARGET_NEXT = "give the folder (or hub id) of a Hugging Face causal LM with safetensors weights"
_COPY_NEXT = "copy the target's folder again, whole"
#: Parts of names that belong to encoders and multi-token-prediction layers, which may have an embedding of their own.
_OTHERS = ("mtp", "visual", "vision_tower", "vision_model", "audio_tower")
_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetFacts:
    """
    Attributes:
        path: its folder. vocab_size, hidden_size: V, H. tied: embedding and head are one tensor.
        weight_bytes: of its weight files. raw: config.json. notes: what the operator should know.
    """

    path: str
    vocab_size: int
    hidden_size: int
    tied: bool
    weight_bytes: int
    raw: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json.

    Raises:
        ConfigError: no such folder, or no config.json that can be read.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "there is no such folder" if not folder.is_dir() else "no config.json: this is no target"
        raise ConfigError(what, f"target.path = {folder}", TARGET_NEXT) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json cannot be read: {error}", str(file), TARGET_NEXT) from error
    if not isinstance(raw, dict):
        raise ConfigError("config.json is not an object", str(file), TARGET_NEXT)
    return raw


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a vision-language config the language model's part."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def is_tied(raw: Mapping[str, Any]) -> bool | None:
    """Whether embedding and head are said to be one tensor; None if config.json says nothing."""
    tied = raw.get("tie_word_embeddings", text_part(raw).get("tie_word_embeddings"))
    return None if tied is None else bool(tied)


def read_target(path: str, *, weights: bool = True) -> TargetFacts:
    """
    Args:
        weights: False where only the small files are there: then config.json and the index are believed.

    Raises:
        ConfigError: no such folder, no config.json, or weights that are not all there.
    """
    folder = Path(path)
    raw = read_config(folder)
    file = folder / "config.json"
    try:
        vocab, hidden = int(text_part(raw)["vocab_size"]), int(text_part(raw)["hidden_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json lacks {error}", str(file), TARGET_NEXT) from error
    notes = _quantised(raw)
    if not weights:
        return TargetFacts(path, vocab, hidden, bool(is_tied(raw)), _announced_bytes(folder), raw, notes)
    listed = weight_files(folder)
    headers = {holder: _header(holder) for holder in sorted(set(listed.values()))}
    for name, holder in listed.items():
        if name not in headers[holder]:
            raise ConfigError(
                f"the index places {name} in {holder.name}, which does not hold it",
                str(holder),
                "copy all weight files and the index of one and the same target",
            )
    embed, head = find_embeddings(listed, raw, folder)
    for name in {embed, head}:
        shape = list(headers[listed[name]][name]["shape"])
        if shape != [vocab, hidden]:
            raise ConfigError(
                f"{name} is {shape}, config.json says vocab_size and hidden_size are {[vocab, hidden]}",
                str(listed[name]),
                "put the config.json and the weights of one and the same target there",
            )
    return TargetFacts(path, vocab, hidden, embed == head, sum(f.stat().st_size for f in headers), raw, notes)


def _quantised(raw: Mapping[str, Any]) -> tuple[str, ...]:
    found = raw.get("quantization_config") or text_part(raw).get("quantization_config")
    if not isinstance(found, dict):
        return ()
    method = found.get("quant_method", "an unnamed method")
    return (f"the target is quantised ({method}): the drafter will be this one's, so serve it with this one",)


def _announced_bytes(folder: Path) -> int:
    """Bytes of the weights by the index; 0 if there is none."""
    try:
        return int(json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def find_embeddings(names: Iterable[str], raw: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Names of the embedding and the head among a target's tensors; the same one if the target ties them.

    They are found by the ends of their names: a vision-language target keeps them deeper.

    Args:
        names: of all tensors. raw: config.json. folder: for messages.

    Raises:
        ConfigError: there is no embedding, or no head although config.json says that it is not tied.
    """

    def find(suffix: str) -> str | None:
        found = [n for n in names if n == suffix or n.endswith("." + suffix)]
        found = [n for n in found if not any(part in _OTHERS for part in n.split("."))]
        return min(found, key=lambda n: ("language_model" not in n, len(n), n)) if found else None

    names = list(names)
    embed, head, tied = find(_EMBED), find(_HEAD), is_tied(raw)
    if embed is None:
        raise ConfigError(f"the target's weights hold no {_EMBED}", str(folder), TARGET_NEXT)
    if head is None and tied is False:
        raise ConfigError(
            f"the target's weights hold no {_HEAD}, and its config says it is not tied", str(folder), TARGET_NEXT
        )
    return embed, embed if tied or head is None else head


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it.

    Raises:
        ConfigError: no safetensors weights, or some are missing; names the first.
    """
    index = folder / INDEX
    if index.exists():
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / str(file) for name, file in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{INDEX} cannot be read: {error}", str(index), TARGET_NEXT) from error
        absent = sorted({f.name for f in files.values() if not f.is_file()})
        if absent:
            raise ConfigError(f"weights are missing: {', '.join(absent[:3])}", str(folder), _COPY_NEXT)
        return files
    single = folder / SINGLE
    if not single.is_file():
        raise ConfigError(f"weights are missing: {_instead(folder)}", str(folder), _instead_next(folder))
    return dict.fromkeys(_header(single), single)


def _pickled(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.glob("*.bin") if f.name.startswith(("pytorch_model", "model")))


def _instead(folder: Path) -> str:
    """What lies there in the place of safetensors files."""
    pickled = _pickled(folder)
    if pickled:
        return f"{SINGLE} (there is {pickled[0]}, a pickled format, which is not read)"
    shards = sorted(f.name for f in folder.glob("*.safetensors"))
    if shards:
        return f"{INDEX} (there are {len(shards)} files of weights, first {shards[0]}, and no index of them)"
    return SINGLE


def _instead_next(folder: Path) -> str:
    if _pickled(folder):
        return (
            "load it once with transformers and save it with save_pretrained(folder): that writes safetensors. "
            "Do so only if you trust its origin: pickles run code"
        )
    return _COPY_NEXT if list(folder.glob("*.safetensors")) else TARGET_NEXT


def _header(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name, after a look at whether it is as long as its header says.

    Raises:
        ConfigError: it is cut, or no safetensors file.
    """
    try:
        size = file.stat().st_size
        header, start = read_header(file)
        header.pop("__metadata__", None)
        whole = start + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        for entry in header.values():
            list(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"this is no whole safetensors file: {error}", str(file), _COPY_NEXT) from error
    if size != whole:
        raise ConfigError(f"the file has {size} bytes, its header says {whole}", str(file), _COPY_NEXT)
    return header


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its data begin, in bytes.

    Raises:
        OSError, ValueError: it cannot be read, is cut, or is no object.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= file.stat().st_size - 8:
            raise ValueError("its header is cut")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, 8 + length
