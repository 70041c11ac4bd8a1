"""known_hosts: which keys a host may show; own reader, so that an error can name file and line.

The rule here: strict. An unknown key is an error that shows it, a changed key is an error that nothing overrides.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.errors import DflashError, HostKeyChanged, HostKeyUnknown

#: Files of the whole machine, read after the user's own.
GLOBAL = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))


@dataclass(frozen=True)
class Known:
    """One line that is about the host asked for. `authority`: its key signs host keys, and is none itself."""

    kind: str
    blob: bytes
    file: Path
    line: int
    revoked: bool = False
    authority: bool = False


def fingerprint(blob: bytes) -> str:
    """As ssh-keygen -l prints it: SHA256:..."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def look_up(name: str, files: Iterable[Path]) -> list[Known]:
    """Every key that these files and the machine's own know for `name` (`host`, or `[host]:port`).

    Raises:
        DflashError: a file is there and cannot be read.
    """
    found: list[Known] = []
    for file in (*files, *GLOBAL):
        try:
            text = file.read_text("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DflashError(
                f"the file of host keys cannot be read: {error.strerror}", str(file), "make it readable"
            ) from None
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            marker = words.pop(0) if words[0].startswith("@") else ""
            if marker not in ("", "@revoked", "@cert-authority") or len(words) < 3 or not _matches(name, words[0]):
                continue
            try:
                blob = base64.b64decode(words[2], validate=True)
            except (ValueError, binascii.Error):
                continue
            found.append(Known(words[1], blob, file, number, marker == "@revoked", marker == "@cert-authority"))
    return found


def _matches(name: str, patterns: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            _, _, salt, digest = patterns.split("|")
            wanted = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(wanted, base64.b64decode(digest))
        except (ValueError, binascii.Error):
            return False
    hit = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # brackets are part of the name here ([host]:port), no set of letters as fnmatch has it
        text = pattern[negated:].replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), text):
            if negated:
                return False
            hit = True
    return hit


def judge(name: str, kind: str, blob: bytes, known: Sequence[Known], *, place: str, accept_new: bool) -> bool:
    """Whether the shown key is known; False = new and to be accepted.

    Raises:
        HostKeyChanged: another key of this kind is known, or this one is revoked. HostKeyUnknown.
    """
    shown = fingerprint(blob)
    # Host certificates are not checked: such a host is unknown until its own key is accepted.
    authority = next((one for one in known if one.authority), None)
    known = [one for one in known if not one.authority]
    for one in known:
        if one.blob == blob and one.revoked:
            raise HostKeyChanged(
                f"the host's key is marked as revoked: {kind} {shown}",
                f"{place}; {one.file}:{one.line}",
                "do not connect; ask whoever keeps that host",
            )
    if any(one.blob == blob for one in known):
        return True
    trusted = [one for one in known if not one.revoked]
    if trusted:
        old = next((one for one in trusted if one.kind == kind), trusted[0])
        raise HostKeyChanged(
            f"the host shows another key than the known one\n  shown: {kind} {shown}\n"
            f"  known: {old.kind} {fingerprint(old.blob)}",
            f"{place}; {old.file}:{old.line}",
            "never accepted by dflash-ops: it may be another machine in its place. Compare at its console "
            "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub); if it was reinstalled, forget the old key: "
            f"ssh-keygen -R '{name}' -f {old.file}",
        )
    if accept_new:
        return False
    raise HostKeyUnknown(
        f"the host's key is not known yet: {kind} {shown}",
        place,
        (
            f"{authority.file}:{authority.line} (@cert-authority) is not used: host certificates are not read. "
            if authority is not None
            else ""
        )
        + "compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host itself, then accept it: "
        "dflash-ops doctor --accept-new",
    )


def remember(name: str, kind: str, blob: bytes, file: Path) -> None:
    """Append the key to `file`, which is made if need be (mode 600).

    Raises:
        DflashError: it cannot be written.
    """
    line = f"{name} {kind} {base64.b64encode(blob).decode()}\n".encode()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            if size:
                out.seek(size - 1)
                line = line if out.read(1) == b"\n" else b"\n" + line
            out.write(line)
    except OSError as error:
        raise DflashError(
            f"the new host key cannot be written: {error.strerror}", str(file), "make it writable"
        ) from None
