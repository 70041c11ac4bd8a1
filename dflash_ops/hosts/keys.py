"""Private keys: the agent's and those of files; a passphrase is asked for once.

The rule here: no passphrase and no private part of a key is ever part of a message, a log or an argument list.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramiko import Agent, PKey
from paramiko.ssh_exception import PasswordRequiredException, SSHException

from dflash_ops.errors import AuthenticationFailed
from dflash_ops.hosts.base import PASSPHRASE
from dflash_ops.hosts.sshconfig import Hop

#: How often a person may mistype.
TRIES = 3

ASKPASS_S = 120.0


@dataclass(frozen=True)
class Key:
    """A key to try; `name` says in messages where it is from."""

    key: Any
    name: str


class Keyring:
    """Keys for a hop, best first. Opened files and passphrases are kept in memory for as long as this object lives.

    Attributes:
        asking: whether a person is being asked for a passphrase now.
        may_ask: whether one may be. A command that has the terminal for itself (`status --watch`) says no; a key that
            needs one is then an error.
    """

    def __init__(self) -> None:
        self.asking = False
        self.may_ask = True
        self._lock = threading.Lock()
        self._opened: dict[Path, Any] = {}

    def keys(self, hop: Hop, faults: list[str]) -> Iterator[Key]:
        """Named key files that the agent holds, other keys of the agent, then key files.

        Args:
            faults: what is wrong with files that were left out is added to it.

        Raises:
            AuthenticationFailed: a passphrase is needed and cannot be had, or is wrong.
        """
        agent = list(_agent_keys(hop.agent))
        named = [_public(path) for path in hop.keys[: hop.given]]
        held = {bytes(a.key.asbytes()) for a in agent}
        yield from sorted(
            (a for a in agent if not hop.identities_only or a.key.asbytes() in named),
            key=lambda a: a.key.asbytes() not in named,
        )
        for path in hop.keys:
            public = _public(path)
            if public is not None and public in held:
                continue  # the agent has it: tried already, and no passphrase is needed
            key = self._open(path, faults)
            if key is not None:
                yield Key(key, str(path))

    def _open(self, path: Path, faults: list[str]) -> Any:
        """The key of a file; None (and a fault noted) where there is none to be had."""
        with self._lock:
            if path in self._opened:
                return self._opened[path]
            try:
                key = PKey.from_path(str(path))
            except PasswordRequiredException:
                key = self._unlock(path)
            except FileNotFoundError:
                faults.append(f"{path} is not there")
                return None
            except (OSError, ValueError, TypeError, SSHException) as error:
                if _encrypted(path):
                    key = self._unlock(path)
                else:
                    faults.append(f"{path} cannot be used: {type(error).__name__}: {error}")
                    return None
            self._opened[path] = key
            return key

    def _unlock(self, path: Path) -> Any:
        for attempt, (passphrase, source) in enumerate(_passphrases(path, self)):
            try:
                return PKey.from_path(str(path), passphrase.encode())
            except (SSHException, ValueError, TypeError):
                if source != "terminal":
                    raise AuthenticationFailed(
                        f"the passphrase from {source} does not open the key", str(path), "correct it"
                    ) from None
                if attempt + 1 < TRIES:
                    print("That passphrase does not open the key.", file=sys.stderr)
        raise AuthenticationFailed(
            "the key is protected by a passphrase, and none was given",
            str(path),
            f"add it to your agent (ssh-add {path}), run this in a terminal, or set {PASSPHRASE} or SSH_ASKPASS",
        )


#: One for all hosts of this process: a passphrase is asked for once.
SHARED = Keyring()


def _passphrases(path: Path, keyring: Keyring) -> Iterator[tuple[str, str]]:
    """Where a passphrase may come from: the environment, an askpass program, a person."""
    if (said := os.environ.get(PASSPHRASE)) is not None:
        yield said, PASSPHRASE
        return
    forced = os.environ.get("SSH_ASKPASS_REQUIRE") in ("force", "prefer")
    terminal = keyring.may_ask and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    program = os.environ.get("SSH_ASKPASS")
    if program and (forced or not terminal):
        if (answer := _askpass(program, path)) is not None:
            yield answer, "SSH_ASKPASS"
        return
    if terminal:
        import getpass

        for _ in range(TRIES):
            keyring.asking = True
            try:
                answer = getpass.getpass(f"Passphrase of {path}: ")
            finally:
                keyring.asking = False
            yield answer, "terminal"


def _askpass(program: str, path: Path) -> str | None:
    try:
        done = subprocess.run(
            [program, f"Passphrase of {path}:"], stdout=subprocess.PIPE, timeout=ASKPASS_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip("\r\n") if done.returncode == 0 else None


def _encrypted(path: Path) -> bool:
    """Whether the file is a private key under a passphrase: libraries differ in how they say so."""
    with contextlib.suppress(OSError):
        text = path.read_bytes()
        if b"ENCRYPTED" in text:
            return True
        if b"BEGIN OPENSSH PRIVATE KEY" in text:
            import base64

            body = b"".join(line for line in text.splitlines() if line and not line.startswith(b"-"))
            with contextlib.suppress(ValueError):
                # after the magic stands the cipher's name, with its length; "none" is no passphrase
                return base64.b64decode(body)[15:].startswith(b"\0\0\0\x04none") is False
    return False


def _public(path: Path) -> bytes | None:
    """The public half beside a private key, as it goes over the wire."""
    import base64

    try:
        words = path.with_name(path.name + ".pub").read_text("utf-8", "replace").split()
        return base64.b64decode(words[1])
    except (OSError, ValueError, IndexError):
        return None


def _agent_keys(socket_path: str | None) -> Iterator[Key]:
    """Keys of the agent; one that does not answer has none."""
    if not socket_path:
        return
    before = os.environ.get("SSH_AUTH_SOCK")
    os.environ["SSH_AUTH_SOCK"] = socket_path  # paramiko knows no other way to name it
    try:
        keys = Agent().get_keys()
    except (SSHException, OSError, EOFError):
        keys = ()
    finally:
        if before is None:
            del os.environ["SSH_AUTH_SOCK"]
        else:
            os.environ["SSH_AUTH_SOCK"] = before
    for key in keys:
        comment = str(getattr(key, "comment", "") or "")
        yield Key(key, f"agent ({comment})" if comment else "agent")
