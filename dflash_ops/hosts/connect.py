"""One ssh connection: socket, hops, host keys, keys of our own, and a watch that notices a peer that went silent.

The rule here: nothing waits for ever. A peer that is gone is noticed by the kernel (unacknowledged data for 11 s), one
that acknowledges and never answers by our own watch; both become ConnectionLost in whoever waits, within 14 s.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paramiko import Transport
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from dflash_ops.errors import AuthenticationFailed, DflashError, HostUnreachable
from dflash_ops.hosts import knownhosts
from dflash_ops.hosts.base import PASSPHRASE
from dflash_ops.hosts.keys import Keyring
from dflash_ops.hosts.sshconfig import Hop

#: Milliseconds of unacknowledged data after which the kernel gives a connection up. It must outlast a cut of 5 s:
#: retransmissions come at r, 3r, 7r, 15r, ... seconds (r = 0.2 and more, by the round trips before), so that the first
#: one behind the cut may be 10 s + r after its start. With 8 s a cut was survived or not by the value of r.
USER_TIMEOUT_MS = 11_000

#: Seconds between two signs of life that paramiko sends, and between two answers that our own watch asks for.
KEEPALIVE_S = 3
ASK_S = 2.0

#: Seconds that an answer to the watch may take, where nothing else is heard either. Asked for 2 s after the last one,
#: looked at twice a second: a peer that is gone is noticed within 14 s, by the kernel or by us.
SILENT_S = 11.5

#: Seconds for one hop: TCP, key exchange and authentication together.
HOP_S = 12.0

#: Connections to one sshd that are being made at one time: beyond 10 that are not authenticated yet it drops some of
#: them at random (MaxStartups 10:30:100), and a hundred hosts behind one jump host are all asked at once.
DOOR = 6

_doors: dict[tuple[str, int], threading.BoundedSemaphore] = {}
_doors_lock = threading.Lock()

# paramiko writes tracebacks of lost connections to its log; without a handler Python prints them on standard error.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Connection:
    """An authenticated connection over all hops.

    Args:
        hops: the way, the wanted machine last. keyring: keys and passphrases. until: monotonic time to be done by.
        accept_new: take and remember a host key that is not known.

    Raises:
        HostUnreachable (HostKeyUnknown, HostKeyChanged, AuthenticationFailed): with the hop that it failed at.
    """

    def __init__(self, hops: Sequence[Hop], keyring: Keyring, *, until: float, accept_new: bool = False) -> None:
        self.hop = hops[-1]
        self.sessions = 0
        #: Whether a session was ever had here.
        self.opened = False
        #: Sessions that sshd allows here, once it has refused one.
        self.limit: int | None = None
        self.heard = time.monotonic()
        self._asked: float | None = None
        #: It was closed because nobody answered.
        self.gone = False
        self._closing = threading.Event()
        self._below: list[Any] = []
        self._process: subprocess.Popen[bytes] | None = None
        transport: Any = None
        try:
            for index, hop in enumerate(hops):
                with _door(hop, until):
                    by = min(until, time.monotonic() + HOP_S)
                    sock = self._socket(hop, by) if index == 0 else self._through(transport, hop, by)
                    transport = _transport(sock, hop, by, accept_new)
                    self._below.append(transport)
                    _authenticate(transport, hop, keyring, by)
        except BaseException:
            self.close()
            raise
        self.transport = transport
        self.heard = time.monotonic()
        for work in (self._ask, self._judge):
            threading.Thread(target=work, name=f"{work.__name__} {self.hop.place}", daemon=True).start()

    # -- alive

    @property
    def alive(self) -> bool:
        return bool(self.transport.is_active()) and not self.silent

    @property
    def silent(self) -> bool:
        """The peer owes an answer and nothing at all has come for too long."""
        asked = self._asked
        return asked is not None and time.monotonic() - max(asked, self.heard) > SILENT_S

    def _ask(self) -> None:
        """Asks for an answer again and again (sshd must give one, if only to say no)."""
        while not self._closing.wait(ASK_S) and self.transport.is_active():
            self._asked = time.monotonic()
            try:
                self.transport.global_request("keepalive@openssh.com", wait=True)  # returns once the peer is gone
            except (OSError, EOFError, SSHException):
                return
            if not self.transport.is_active():
                return
            self._asked = None
            self.heard = time.monotonic()

    def _judge(self) -> None:
        """Closes a silent connection: calls of paramiko that would wait for ever come back then."""
        while not self._closing.wait(0.5) and self.transport.is_active():
            if self.silent:
                self.gone = True
                self.transport.close()

    def close(self) -> None:
        """All hops, from the last to the first; never waits for the peer."""
        self._closing.set()
        for transport in reversed(self._below):
            with contextlib.suppress(OSError, EOFError, SSHException):
                transport.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()

    # -- the way

    def _socket(self, hop: Hop, until: float) -> Any:
        if hop.proxy_command is not None:
            return self._command(hop)
        return _tcp(hop, until)

    def _command(self, hop: Hop) -> socket.socket:
        """Both ends of ProxyCommand's standard input and output as one socket."""
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k != PASSPHRASE}
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {hop.proxy_command}"], stdin=theirs.fileno(), stdout=theirs.fileno(), env=env
            )
        finally:
            theirs.close()
        return ours

    def _through(self, transport: Any, hop: Hop, until: float) -> Any:
        """A channel of the hop before, to the next one."""
        try:
            return transport.open_channel(
                "direct-tcpip", (hop.address, hop.port), ("127.0.0.1", 0), timeout=_left(until)
            )
        except (SSHException, EOFError, OSError) as error:
            raise HostUnreachable(
                f"the jump host cannot reach {hop.address} port {hop.port}: {error}",
                f"jump over {transport.getpeername()[0] if hasattr(transport, 'getpeername') else 'the host before'}",
                "try it there by hand: ssh from that host to the next",
            ) from None


@contextlib.contextmanager
def _door(hop: Hop, until: float) -> Iterator[None]:
    """One of the DOOR places for making a connection to this sshd.

    Raises:
        HostUnreachable: none became free in time: those before us did not come through either.
    """
    with _doors_lock:
        door = _doors.setdefault((hop.address, hop.port), threading.BoundedSemaphore(DOOR))
    if not door.acquire(timeout=_left(until)):
        raise HostUnreachable(
            f"{DOOR} connections to it are being made, and none came through in time",
            hop.place,
            "is sshd slow there, or the machine overloaded?",
        )
    try:
        yield
    finally:
        door.release()


def _left(until: float) -> float:
    return max(0.1, until - time.monotonic())


def _tcp(hop: Hop, until: float) -> socket.socket:
    """A TCP connection: the first address that answers."""
    try:
        found = socket.getaddrinfo(hop.address, hop.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        said = error.strerror if isinstance(error, socket.gaierror) else "no name of a host"
        raise HostUnreachable(
            f"the name {hop.address} cannot be resolved: {said}", hop.place, "correct `address`, or look at your DNS"
        ) from None
    last: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            # set before connecting: it bounds the connecting as well
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
                ("TCP_KEEPIDLE", KEEPALIVE_S),
                ("TCP_KEEPINTVL", KEEPALIVE_S),
                ("TCP_KEEPCNT", 3),
            ):
                if hasattr(socket, name):  # macOS has other names for some
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            sock.settimeout(_left(until))
            sock.connect(address)
            return sock
        except OSError as error:
            last = error
            sock.close()
    timeout = isinstance(last, TimeoutError) or last.errno == errno.ETIMEDOUT
    reason = "no answer" if timeout else (last.strerror or str(last))
    raise HostUnreachable(
        f"cannot connect to {hop.address} port {hop.port}: {reason}",
        hop.place,
        "is sshd running there, and is `port` right?"
        if last.errno == errno.ECONNREFUSED
        else "is the machine up, is the network (VPN) up, and are `address` and `port` right?",
    )


def _transport(sock: Any, hop: Hop, until: float, accept_new: bool) -> Any:
    """Key exchange, and the judgement of the host's key."""
    known = knownhosts.look_up(hop.key_name, hop.known_hosts)
    transport: Any = None
    try:
        transport = Transport(sock)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = _left(until)
        _prefer(transport, [k.kind for k in known if not k.revoked and not k.authority])
        transport.start_client(timeout=_left(until))
        transport.set_keepalive(KEEPALIVE_S)
        key = transport.get_remote_server_key()
    except (SSHException, EOFError, OSError) as error:
        if transport is not None:
            transport.close()
        else:
            sock.close()
        raise HostUnreachable(
            f"no ssh connection to {hop.address} port {hop.port}: "
            + ("no answer in time" if time.monotonic() >= until - 0.5 else _said(error)),
            hop.place,
            f"try it by hand: ssh -v -p {hop.port} {hop.user}@{hop.address} true",
        ) from None
    kind, blob = str(key.get_name()), bytes(key.asbytes())
    try:
        if not knownhosts.judge(hop.key_name, kind, blob, known, place=hop.place, accept_new=accept_new):
            knownhosts.remember(hop.key_name, kind, blob, hop.known_hosts[0])
    except DflashError:
        transport.close()
        raise
    return transport


def _prefer(transport: Any, kinds: Sequence[str]) -> None:
    """Ask for the kinds of host key that are known first: another one would look like an unknown host.

    And for ciphers that need no code of their own against tampering: 200 MB take 0.30 s of CPU time instead of 0.50 s.
    """
    wanted: list[str] = []
    for kind in kinds:
        wanted += ["rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind]
    options = transport.get_security_options()
    offered = list(options.key_types)
    first = [k for k in dict.fromkeys(wanted) if k in offered]
    options.key_types = [*first, *(k for k in offered if k not in first)]
    ciphers = list(options.ciphers)
    options.ciphers = sorted(ciphers, key=lambda name: "gcm" not in name)


def _authenticate(transport: Any, hop: Hop, keyring: Keyring, until: float) -> None:
    """Offer keys until one is taken.

    Raises:
        AuthenticationFailed: with the names of the keys that were offered.
    """
    tried: list[str] = []
    faults: list[str] = []
    next_step = (
        f"add your public key to ~/.ssh/authorized_keys of {hop.user} there, name another key (identity), or load it "
        "into your agent"
    )
    why = ""
    for one in keyring.keys(hop, faults):
        transport.auth_timeout = _left(until)
        tried.append(one.name)
        try:
            more = transport.auth_publickey(hop.user, one.key)
        except BadAuthenticationType as error:
            why = f"it takes no keys, only: {', '.join(error.allowed_types)}"
            break
        except AuthenticationException as error:
            if not transport.is_active():
                why = "it closed the connection after these"
                break
            if "timeout" in str(error).lower():
                why = "it did not answer"
                break
            continue
        except (SSHException, EOFError, OSError, ValueError) as error:
            if not transport.is_active():
                why = "it closed the connection after these"
                break
            faults.append(f"{one.name} cannot sign: {_said(error)}")
            continue
        if not more:
            return
        why = f"a key is not enough there, it also wants: {', '.join(more)}"
        next_step = "allow keys alone for this user in that sshd's AuthenticationMethods"
        break
    said = f"{hop.user} is not let in; keys tried: {', '.join(tried) or 'none, there is none'}"
    raise AuthenticationFailed(
        "; ".join([said, *([why] if why else []), *faults]),
        hop.place,
        next_step,
    )


def _said(error: BaseException) -> str:
    """What went wrong, in words; paramiko's EOFError has none."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or "the other side closed the connection"
