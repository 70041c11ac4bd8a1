"""Who is asked for a key's passphrase, and when nobody may be."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dflash_ops.errors import AuthenticationFailed
from dflash_ops.hosts.keys import Keyring


def test_nobody_is_asked_while_another_has_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "id"
    locked = s.BestAvailableEncryption(b"open")
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, locked))
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    for name in ("SSH_ASKPASS", "DFLASH_SSH_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)
    asked: list[bool] = []
    keyring = Keyring()

    def answer(prompt: str) -> str:
        asked.append(keyring.asking)
        return "open"

    monkeypatch.setattr(getpass, "getpass", answer)
    keyring.may_ask = False
    with pytest.raises(AuthenticationFailed, match="none was given"):
        keyring._open(path, [])
    assert asked == []
    keyring.may_ask = True
    assert keyring._open(path, []) is not None
    assert (asked, keyring.asking) == ([True], False)
    keyring.may_ask = False
    assert keyring._open(path, []) is not None  # asked for once
