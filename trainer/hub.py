"""A target that is named by its hub id: the folder that the hub's cache keeps it in, fetched if it is not there.

What is in the cache is taken as it is, without asking the hub, so a run that is started again trains against the same
weights; `target.revision` pins them across machines. A machine without a network is told how to get the files there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.target_files import weight_files

if TYPE_CHECKING:
    from trainer.config import RunConfig

#: Configs, tokenizer and chat template.
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = ("*.safetensors",)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Found:
    """folder: on this machine. whole: the weights are there too. note: of a hub id, what it was found as."""

    folder: str
    whole: bool = True
    note: str | None = None


def is_hub_id(path: str) -> bool:
    """ "org/name", where no such folder exists."""
    return _ID.fullmatch(path) is not None and not Path(path).exists()


def target_folder(path: str | Path, revision: str | None = None) -> Path:
    """For commands that take a folder or a hub id: the folder, with the weights.

    Raises:
        ConfigError: as `find`.
    """
    return Path(find(str(path), revision, key="--target").folder)


def on_this_machine(config: RunConfig, *, weights: bool) -> tuple[RunConfig, bool, list[str]]:
    """The config with folders in the place of hub ids.

    Args:
        weights: fetch them too; otherwise the small files only (`check`).

    Returns:
        The config, whether the target's weights are there, and what the operator should know.

    Raises:
        ConfigError: as `find`.
    """
    found = find(config.target.path, config.target.revision, weights=weights)
    notes = [] if found.note is None else [found.note]
    config = replace(config, target=replace(config.target, path=found.folder))
    if config.data.tokenizer is not None:
        tokenizer = find(config.data.tokenizer, None, key="data.tokenizer", patterns=SMALL)
        notes += [] if tokenizer.note is None else [tokenizer.note]
        config = replace(config, data=replace(config.data, tokenizer=tokenizer.folder))
    return config, found.whole, notes


def find(
    path: str,
    revision: str | None,
    *,
    key: str = "target.path",
    weights: bool = True,
    patterns: Sequence[str] | None = None,
) -> Found:
    """
    Args:
        path: a folder, or a hub id. revision: branch, tag or commit of the hub id; None: main.
        key: where the path was given, for messages. weights: fetch them if they are not there.
        patterns: files to look for, if it is no whole target.

    Raises:
        ConfigError: no folder and no hub id, the hub cannot be reached or refuses, a revision for a folder.
    """
    if not is_hub_id(path):
        if revision is not None:
            raise ConfigError(
                f"{path} is a folder (or no hub id), and a revision belongs to a hub id",
                f"{key} = {path}, target.revision = {revision}",
                "remove target.revision, or name the target as org/name",
            )
        return Found(path)
    wanted = tuple(patterns or SMALL + WEIGHTS)
    folder = _cached(path, revision, wanted, key)
    if folder is not None and (patterns is not None or _has_weights(folder)):
        return Found(folder, True, _note(key, path, folder))
    if not weights and patterns is None:
        folder = _cached(path, revision, SMALL, key) or _fetch(path, revision, SMALL, key)
        note = f"the weights of {path} are not on this machine yet: run fetches them from the hub"
        return Found(folder, _has_weights(folder), note)
    folder = _fetch(path, revision, wanted, key)
    return Found(folder, True, _note(key, path, folder))


def _note(key: str, path: str, folder: str) -> str:
    return f"{key} = {path} is commit {Path(folder).name}, in {folder}"


def _has_weights(folder: str) -> bool:
    """A fetch that was interrupted leaves a folder without some of them."""
    try:
        weight_files(Path(folder))
    except ConfigError:
        return False
    return True


def _cached(path: str, revision: str | None, patterns: Sequence[str], key: str) -> str | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder: str = snapshot_download(path, revision=revision, allow_patterns=list(patterns), local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ConfigError(
            f"there is no such folder, and this is no hub id: {error}",
            f"{key} = {path}",
            "correct the path, or name the target as org/name",
        ) from error
    return folder if (Path(folder) / "config.json").exists() or (Path(folder) / "tokenizer.json").exists() else None


def _fetch(path: str, revision: str | None, patterns: Sequence[str], key: str) -> str:
    from huggingface_hub import constants, errors, snapshot_download

    # The HTTP library has changed between versions of huggingface_hub; its own error is a child of that one's.
    others: tuple[type[BaseException], ...] = (OSError, ValueError)
    others += tuple(c for c in errors.HfHubHTTPError.__mro__ if c.__name__ in ("HTTPError", "RequestException"))
    named = path if revision is None else f"{path}, revision {revision}"
    where = f"{key} = {path}"
    download = f"hf download {path}" + ("" if revision is None else f" --revision {revision}")
    preload = (
        f"there is no such folder here and it is not in {constants.HF_HUB_CACHE}: fetch it where there is a network "
        f"({download}), and copy the folder that it prints to this machine; give its path in {key}"
    )
    try:
        folder: str = snapshot_download(path, revision=revision, allow_patterns=list(patterns))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"the hub gives {named} only to accounts that accepted its terms",
            where,
            "accept them on its page, and give the account's token in the environment (HF_TOKEN)",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{path} has no revision {revision}", f"{where}, target.revision", "correct it") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"the hub at {constants.ENDPOINT} knows no {path}, or shows it only with a token",
            where,
            "correct the name; for a private one give a token in the environment (HF_TOKEN); or name a folder",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise ConfigError(_OFFLINE.format(named), where, preload) from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(_OFFLINE.format(named), where, preload) from error
        raise ConfigError(
            f"{named} could not be fetched: no answer from the hub at {constants.ENDPOINT} ({_cause(error)})",
            where,
            preload,
        ) from error
    except others as error:
        raise ConfigError(
            f"{named} could not be fetched from the hub at {constants.ENDPOINT}: {_cause(error)}", where, preload
        ) from error
    return folder


_OFFLINE = "{} is not on this machine, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids asking the hub"


def _cause(error: BaseException) -> str:
    """The first line of the innermost error that says something."""
    inner = error.__cause__ or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__
