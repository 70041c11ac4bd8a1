"""What of a folder is not released: `.gitignore` and `.dflashignore`, in git's own pattern language.

The rule here: as git does it. A file's fate is decided by the last pattern that fits, deeper files count after outer
ones, `.dflashignore` after the `.gitignore` beside it (so that `!data/tiny.jsonl` brings a file back), and nothing
below an ignored folder comes back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pathspec

from dflash_ops.errors import ReleaseError

#: Later ones win over earlier ones of the same folder.
FILES = (".gitignore", ".dflashignore")


class Ignores:
    """The patterns that hold in one folder: those of the folders around it, and its own.

    `folder` None: nothing is ignored.
    """

    def __init__(self, specs: tuple[tuple[Path, pathspec.GitIgnoreSpec], ...] = ()) -> None:
        self._specs = specs

    @classmethod
    def around(cls, folder: Path) -> Ignores:
        """Of the repository around `folder` (up to the folder with `.git`), and of nothing where there is none.

        A repository that ignores `folder` itself has no say in what is in it.
        """
        found: list[Path] = []
        for parent in folder.absolute().parents:
            found.insert(0, parent)
            if (parent / ".git").exists():
                break
        else:
            return cls()
        if (folder / ".git").exists():
            return cls()
        around = cls()
        for parent in found:
            around = around.inside(parent)
        return cls() if around.ignored(folder.absolute(), folder=True) else around

    def inside(self, folder: Path) -> Ignores:
        """With the files of `folder`.

        Raises:
            ReleaseError: one of them cannot be read.
        """
        own = tuple((folder, spec) for name in FILES if (spec := _read(folder / name)) is not None)
        return Ignores((*self._specs, *own)) if own else self

    def ignored(self, path: Path, *, folder: bool = False) -> bool:
        """Whether the file (or folder) at this path stays behind."""
        answer = False
        for base, spec in self._specs:
            name = os.path.relpath(path, base) + ("/" if folder else "")
            if (said := spec.check_file(name).include) is not None:
                answer = said
        return answer


def _read(path: Path) -> pathspec.GitIgnoreSpec | None:
    try:
        text = path.read_text("utf-8", "surrogateescape")
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise ReleaseError(
            f"a file of ignored names cannot be read: {error.strerror}", str(path), "make it readable, or remove it"
        ) from error
    try:
        return pathspec.GitIgnoreSpec.from_lines(text.splitlines())
    except ValueError as error:
        raise ReleaseError(f"a pattern cannot be understood: {error}", str(path), "correct that line") from error


def walk(folder: Path, ignores: Ignores | None, never: Iterable[str], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files and links below `folder` that are released, in the order of their names.

    Args:
        ignores: None where no ignore files are looked at (the bundled code).
        never, suffixes: names and endings that are left out whatever the patterns say.

    Raises:
        ReleaseError: a folder or an ignore file cannot be read.
    """
    here = ignores.inside(folder) if ignores is not None else None
    try:
        with os.scandir(folder) as found:
            names = sorted(found, key=lambda e: e.name)
    except OSError as error:
        raise ReleaseError(f"a folder of the release cannot be read: {error.strerror}", str(folder)) from error
    for item in names:
        if item.name in never or item.name.endswith(suffixes):
            continue
        path, below = Path(item.path), item.is_dir(follow_symlinks=False)
        if here is not None and here.ignored(path, folder=below):
            continue
        if below:
            yield from walk(path, here, never, suffixes)
        else:
            yield path
