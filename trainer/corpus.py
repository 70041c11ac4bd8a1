"""The data of a run: conversations are made into tokens once, before training, and kept beside the checkpoints.

The tokens' file has one line for each line of the source, so a sample's id stays its line number. Its name is a hash of
all that decides the tokens (source, tokenizer, chat template, options): a resumed run finds it again and needs neither
the tokenizer nor transformers. It is written beside, fsynced and renamed, so there is a whole file or none.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.chat import read_options
from trainer.config import DataConfig
from trainer.conversation import is_text
from trainer.data import DataIndex, decode, scan
from trainer.encoder import Encoder
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.prompts import end_tokens

#: Raised when the same inputs are to give other tokens than before.
VERSION = 1
#: Lines that go to the tokenizer at a time.
BATCH = 256
#: Lines of conversations that `check` looks at.
GLANCE = 1000
#: After so many lines too many bad ones end the work at once.
_EARLY = 1000
#: Nothing is said about work that takes less, in seconds.
QUIET_S = 2.0
_TOKENIZER_FILES = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges")

#: (lines done, lines in all, rate and time left); may raise to stop the work.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Corpus:
    """The index of a run's samples. notes: what the operator should know."""

    index: DataIndex
    notes: tuple[str, ...] = ()


def open_corpus(
    config: DataConfig,
    target: str,
    vocab_size: int,
    folder: Path | None,
    *,
    limit: int | None = None,
    keep: bool = True,
    progress: Progress | None = None,
) -> Corpus:
    """Reads tokens as they are; makes conversations into tokens, or finds those that were made before.

    Args:
        config: [data]. target: its folder. vocab_size: of the target.
        folder: where tokens are kept if `data.cache` is not given; without either they last as long as the process.
        limit: look at so many lines of tokens only. keep: False writes nothing, and looks at the first lines of
            conversations only (`check`).

    Raises:
        DataError: no such file, too many bad lines, nothing to train on. ConfigError: tokenizer or template.
        TrainerError: the tokens cannot be kept.
    """
    rules = _Rules(config, vocab_size)
    if not _holds_text(config.path):
        return Corpus(rules.scan(Path(config.path), limit))
    maker = _Maker(config, target, vocab_size, progress)
    kept = Path(config.cache) if config.cache else folder / "tokens" if folder is not None else None
    if not keep and (kept is None or limit is not None or _stamp(kept / f"{maker.key()}.jsonl") is None):
        return _glance(maker, rules)
    if kept is None:
        kept = _passing_folder()
    file = kept / f"{maker.key()}.jsonl"
    notes: list[str] = []
    stamp = _stamp(file)
    if stamp is not None:
        index = rules.scan(file)
        if index.sha256 == stamp["sha256"]:
            return Corpus(index, tuple(stamp["notes"]))
        if not keep:
            glance = _glance(maker, rules)
            return replace(glance, notes=(f"the tokens kept in {file} are damaged: run makes them anew", *glance.notes))
        notes.append(f"the tokens kept in {file} were damaged and are made anew")
    notes += maker.keep(file)
    return Corpus(rules.scan(file), tuple(notes))


@dataclass(frozen=True)
class _Rules:
    """What a sample has to be."""

    config: DataConfig
    vocab_size: int

    def scan(self, file: Path, limit: int | None = None) -> DataIndex:
        return scan(
            file,
            vocab_size=self.vocab_size,
            max_length=self.config.max_length,
            max_bad_lines=self.config.max_bad_lines,
            limit_lines=limit,
            source=self.config.path,
        )


def _glance(maker: _Maker, rules: _Rules) -> Corpus:
    """The first lines, made into tokens that are not kept."""
    made = _passing_folder() / "tokens.jsonl"
    notes, _ = maker.make(made, GLANCE)
    index = rules.scan(made)
    if len(list(itertools.islice(_lines(maker.config.path), GLANCE + 1))) > GLANCE:
        index = replace(index, whole=False, sha256="")
    return Corpus(index, notes)


def _passing_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="dflash-tokens-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _holds_text(path: str) -> bool:
    """By the first line that can be read; later lines that differ are named as bad ones."""
    for line in _lines(path):
        try:
            return is_text(decode(line))
        except ValueError:
            continue
    return False


def _lines(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as opened:
            yield from opened
    except OSError as error:
        raise DataError(f"the data cannot be read: {error}", path, "correct data.path") from error


def _stamp(file: Path) -> dict[str, Any] | None:
    """What is known of a kept file, None if there is none that is whole."""
    try:
        found = json.loads(_stamp_of(file).read_text(encoding="utf-8"))
        whole = found["size"] == file.stat().st_size and isinstance(found["sha256"], str)
        return found if whole and isinstance(found["notes"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a half-written or foreign file is made anew


def _stamp_of(file: Path) -> Path:
    return file.with_suffix(".json")


class _Maker:
    """Makes the tokens of one source."""

    def __init__(self, config: DataConfig, target: str, vocab_size: int, progress: Progress | None) -> None:
        self.config = config
        self.target = target
        self.vocab_size = vocab_size
        self.progress = progress
        self.tokenizer_folder = Path(config.tokenizer or target)
        self.options = read_options(config.template_options, "data.template_options")
        self.ends = end_tokens(Path(target))

    @cached_property
    def source(self) -> tuple[str, int]:
        """Hash and number of lines of the data."""
        digest, count = hashlib.sha256(), 0
        for line in _lines(self.config.path):
            digest.update(line)
            count += 1
        return digest.hexdigest(), count

    def key(self) -> str:
        """Names the tokens by all that decides them."""
        files = {}
        if self.tokenizer_folder.is_dir():
            for file in sorted(self.tokenizer_folder.iterdir()):
                if file.is_file() and file.name.startswith(_TOKENIZER_FILES):
                    files[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        parts = {
            "version": VERSION,
            "source": self.source[0],
            "tokenizer": files,
            "template": self._own_template(),
            "options": self.options,
            "turns": self.config.turns,
            "ends": sorted(self.ends),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]

    def _own_template(self) -> str | None:
        if self.config.chat_template is None:
            return None
        try:
            return Path(self.config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the chat template cannot be read: {error}",
                f"data.chat_template = {self.config.chat_template}",
                "name a text file with a Jinja template",
            ) from error

    def keep(self, file: Path) -> tuple[str, ...]:
        """Makes `file` and its stamp; returns what the operator should know.

        Raises:
            TrainerError: the folder cannot be written.
        """
        # Machines may share the folder, and a pid says something on its own only.
        own = f".{file.name}.{socket.gethostname()}."
        beside = file.with_name(f"{own}{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for left in file.parent.glob(glob.escape(own) + "*"):  # of a run that was killed while it wrote
                if not Path(f"/proc/{left.name.rpartition('.')[2]}").exists():
                    left.unlink(missing_ok=True)
            try:
                notes, digest = self.make(beside, None)
                stamp = {"schema": 1, "source": self.config.path, "sha256": digest, "notes": notes}
                stamp["size"] = beside.stat().st_size
                beside.rename(file)
            finally:
                beside.unlink(missing_ok=True)
            beside.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
            beside.rename(_stamp_of(file))
            return notes
        except OSError as error:
            raise TrainerError(
                f"the tokens cannot be kept: {error}", str(file.parent), "make room there, or name another data.cache"
            ) from error

    def make(self, out: Path, limit: int | None) -> tuple[tuple[str, ...], str]:
        """Writes one line for each line of the source; returns what the operator should know, and the lines' sha256."""
        encoder = Encoder(self.tokenizer_folder, self.config, self._own_template(), self.options, self.ends)
        encoder.check_vocabulary(self.vocab_size, Path(self.target))
        total = self.source[1] if limit is None else limit
        source, written = hashlib.sha256(), hashlib.sha256()
        done = bad = skipped = 0
        first = ""
        pace = _Pace(total, self.progress)
        with out.open("wb") as opened:
            for chunk in _chunks(_lines(self.config.path), BATCH, total):
                for line in chunk:
                    source.update(line)
                for made in encoder.encode(chunk):
                    opened.write(made.line)
                    written.update(made.line)
                    done += 1
                    skipped += made.skipped
                    if made.refused is not None:
                        bad += 1
                        first = first or f"line {done}: {made.refused}"
                pace.tell(done)
                if bad > self.config.max_bad_lines and done >= _EARLY and done < total:
                    raise DataError(
                        f"{first} ({bad} bad lines among the first {done}, {self.config.max_bad_lines} allowed)",
                        self.config.path,
                        "correct the lines, or raise data.max_bad_lines to skip them",
                    )
            opened.flush()
            os.fsync(opened.fileno())
        if limit is None and source.hexdigest() != self.source[0]:
            raise DataError("the data changed while it was read", self.config.path, "start again when it is complete")
        notes: tuple[str, ...] = ()
        if skipped:
            left = "the chat template leaves them out or rewrites them"
            notes = (f"{skipped} turns of the assistant have no loss: {left}",)
        return notes, written.hexdigest()


def _chunks(lines: Iterator[bytes], size: int, total: int) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    for number, line in enumerate(lines):
        if number == total:
            break
        chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class _Pace:
    """Says every two seconds how far the work is; nothing about work that is over before."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._start = self._said = time.monotonic()

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if self._progress is None or now - self._said < QUIET_S:
            return
        self._said = now
        rate = done / (now - self._start)
        self._progress(done, self._total, f"{rate:.0f}_lines/s,_{(self._total - done) / rate:.0f}_s_left")
