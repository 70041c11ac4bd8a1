"""From a host of the inventory to the way there: ~/.ssh/config, hops, keys' files, known_hosts' files.

The rule here: what the inventory says comes first, then the user's ssh config, then OpenSSH's defaults. Nothing is
connected here.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import paramiko.config
from paramiko import SSHConfig
from paramiko.ssh_exception import ConfigParseError

from dflash_ops.errors import UsageError
from dflash_ops.hosts.base import PASSPHRASE

#: How deep jumps may lead to hosts that have jumps of their own.
DEPTH = 8

#: Private keys that OpenSSH tries by itself.
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")

#: Seconds for a command of `Match exec`.
EXEC_S = 10.0

_EXEC_LOCK = threading.Lock()

_HOP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]*)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@]+))(?::(?P<port>\d+))?/?")


@dataclass(frozen=True)
class Hop:
    """One machine on the way, the last one included.

    Args:
        alias: as it was named. address, port, user: where and as whom.
        keys: private key files to try, `given` of them by name and not by default.
        known_hosts: files of host keys; new ones go to the first. key_name: what host keys are filed under.
        identities_only: keys of the agent are tried only where their file is named.
        agent: socket of the agent, or None. proxy_command: instead of a socket of our own; first hop only.
    """

    alias: str
    address: str
    port: int
    user: str
    keys: tuple[Path, ...]
    given: int
    known_hosts: tuple[Path, ...]
    key_name: str
    identities_only: bool = False
    agent: str | None = None
    proxy_command: str | None = None

    @property
    def place(self) -> str:
        port = f" port {self.port}" if self.port != 22 else ""
        return f"{self.user}@{self.address}{port}"


class SshConfig:
    """The user's ssh config, read once."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Raises:
            UsageError: it cannot be read or understood.
        """
        self.path = path if path is not None else Path("~/.ssh/config").expanduser()
        try:
            text = "\n".join(_lines(self.path, 0)) if self.path.exists() else ""
            self._config: Any = SSHConfig.from_text(text)
        except (OSError, UnicodeDecodeError, ConfigParseError) as error:
            raise UsageError(f"the ssh config cannot be read: {error}", str(self.path), "correct it") from None

    def look_up(self, alias: str) -> dict[str, Any]:
        """Options of one host, names in lower case.

        Raises:
            UsageError: a value that has no meaning here; a command of `Match exec` that does not end.
        """
        try:
            with _exec_of_ours():
                return dict(self._config.lookup(alias))
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"the ssh config cannot be used for {alias}: no end of `Match exec {error.cmd[-1]}` in {EXEC_S:g} s",
                str(self.path),
                "see what holds that command up",
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"the ssh config cannot be used for {alias}: {error}",
                str(self.path),
                f"see what ssh makes of it: ssh -G {shlex.quote(alias)}; name user, port, identity and jump in the "
                "inventory",
            ) from None

    def way(
        self,
        address: str,
        *,
        user: str | None = None,
        port: int | None = None,
        identity: str | None = None,
        jump: Sequence[str] = (),
        known_hosts: str | None = None,
    ) -> tuple[Hop, ...]:
        """The hops to `address`, itself the last; what is None or empty is taken from the config.

        Raises:
            UsageError: a jump that cannot be meant, jumps that lead to themselves.
        """
        return self._way(address, user, port, identity, tuple(jump), known_hosts, 0)

    def _way(
        self,
        alias: str,
        user: str | None,
        port: int | None,
        identity: str | None,
        jump: tuple[str, ...],
        known_hosts: str | None,
        depth: int,
    ) -> tuple[Hop, ...]:
        if depth > DEPTH:
            raise UsageError(
                "the jump hosts lead to themselves", f"{self.path}, ProxyJump of {alias}", "break the circle"
            )
        said = self.look_up(alias)
        jumps = jump or tuple(
            j.strip() for j in str(said.get("proxyjump", "")).split(",") if j.strip() and j.strip().lower() != "none"
        )
        command = said.get("proxycommand") if not jumps else None
        before: tuple[Hop, ...] = ()
        for index, hop in enumerate(jumps):
            # as ssh -J: the first jump is reached by its own config, each later one through the one before
            hop_user, hop_host, hop_port = _parse(hop, alias)
            if index == 0:
                reached = self._way(hop_host, hop_user, hop_port, None, (), None, depth + 1)
            else:
                reached = (self._hop(hop_host, hop_user, hop_port, None, None, None),)
            # its own keys and known_hosts first, then those that the inventory names for the last machine
            more_keys, more_files = (_path(p) for p in [identity] if p), (_path(p) for p in [known_hosts] if p)
            last = replace(
                reached[-1],
                keys=tuple(dict.fromkeys((*reached[-1].keys, *more_keys))),
                known_hosts=tuple(dict.fromkeys((*reached[-1].known_hosts, *more_files))),
            )
            before = (*before, *reached[:-1], last)
        return (*before, self._hop(alias, user, port, identity, known_hosts, command))

    def _hop(
        self,
        alias: str,
        user: str | None,
        port: int | None,
        identity: str | None,
        known_hosts: str | None,
        command: str | None,
    ) -> Hop:
        said = self.look_up(alias)
        address = str(said.get("hostname", alias))
        where = port if port is not None else int(said.get("port", 22))
        named = [identity] if identity else []
        named += [str(k) for k in said.get("identityfile", ())]
        keys = [_path(k) for k in dict.fromkeys(named)]
        files = [known_hosts] if known_hosts else str(said.get("userknownhostsfile", "~/.ssh/known_hosts")).split()
        name = str(said.get("hostkeyalias") or (address.lower() if where == 22 else f"[{address.lower()}]:{where}"))
        given = len(keys)
        keys += [p for k in DEFAULT_KEYS if (p := _path(k)) not in keys and p.exists()] if not given else []
        return Hop(
            alias=alias,
            address=address,
            port=where,
            user=user or str(said.get("user") or getpass.getuser()),
            keys=tuple(keys),
            given=given,
            known_hosts=tuple(_path(f) for f in files),
            key_name=name,
            identities_only=identity is not None or str(said.get("identitiesonly", "no")).lower() == "yes",
            agent=_agent(said.get("identityagent")),
            proxy_command=command if command and command.strip().lower() != "none" else None,
        )


class _Invoke:
    """What paramiko asks of the package `invoke` for `Match exec`, which is not installed with it."""

    class Result(NamedTuple):
        ok: bool

    @staticmethod
    def run(command: str, **_: object) -> Result:
        """As ssh: by the user's shell, output unseen, in time; the passphrase is nobody else's business."""
        shell = os.environ.get("SHELL") or "/bin/sh"
        env = {k: v for k, v in os.environ.items() if k != PASSPHRASE}
        done = subprocess.run(
            [shell, "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env, timeout=EXEC_S
        )
        return _Invoke.Result(done.returncode == 0)


@contextlib.contextmanager
def _exec_of_ours() -> Iterator[None]:
    with _EXEC_LOCK:
        before, paramiko.config.invoke = paramiko.config.invoke, _Invoke
        try:
            yield
        finally:
            paramiko.config.invoke = before


def _path(text: str) -> Path:
    return Path(text.strip('"')).expanduser()


def _agent(said: object) -> str | None:
    """Socket of the agent, as IdentityAgent says, else SSH_AUTH_SOCK."""
    text = str(said).strip('"') if said else "SSH_AUTH_SOCK"
    if text.lower() == "none":
        return None
    if text == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if text.startswith("$"):
        return os.environ.get(text[1:].strip("{}")) or None
    return str(Path(text).expanduser())


def _parse(hop: str, alias: str) -> tuple[str | None, str, int | None]:
    found = _HOP.fullmatch(hop)
    if found is None:
        raise UsageError(f"{hop!r} is no host to jump over", f"on the way to {alias}", "write user@host:port")
    port = int(found["port"]) if found["port"] else None
    return found["user"] or None, found["six"] or found["host"], port


def _lines(path: Path, depth: int) -> list[str]:
    """The config's lines with every `Include` put in its place (paramiko knows no Include)."""
    if depth > 16:
        raise UsageError("ssh config files include each other without end", str(path), "break the circle")
    lines: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() != "include":
            lines.append(line)
            continue
        for pattern in rest.split():
            text = pattern.strip('"')
            whole = str(Path(text).expanduser()) if text.startswith(("/", "~")) else str(path.parent / text)
            for found in sorted(glob.glob(whole)):  # noqa: PTH207  # an absolute pattern, as ssh takes it
                lines += _lines(Path(found), depth + 1)
    return lines
