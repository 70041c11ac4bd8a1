"""known_hosts, held to what OpenSSH's own tools write and say."""

from __future__ import annotations

import base64
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from dflash_ops.errors import DflashError, HostKeyChanged, HostKeyUnknown
from dflash_ops.hosts import knownhosts

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen (openssh-client) is not here")


def make(folder: Path, name: str) -> tuple[str, bytes]:
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=20)
    kind, blob, *_ = path.with_suffix(".pub").read_text().split()
    return kind, base64.b64decode(blob)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: make(folder, name)[1] for name in ("one", "two")}


def line(name: str, blob: bytes, kind: str = "ssh-ed25519") -> str:
    return f"{name} {kind} {base64.b64encode(blob).decode()} comment\n"


def judge(file: Path, blob: bytes, name: str = "192.0.2.6", *, accept_new: bool = False) -> bool:
    known = knownhosts.look_up(name, [file])
    return knownhosts.judge(name, "ssh-ed25519", blob, known, place="root@192.0.2.6", accept_new=accept_new)


def test_the_fingerprint_is_ssh_keygens(tmp_path: Path) -> None:
    _, blob = make(tmp_path, "key")
    said = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True)
    assert knownhosts.fingerprint(blob) == said.stdout.split()[1]


@pytest.mark.parametrize(
    ("patterns", "name", "hit"),
    [
        ("192.0.2.6", "192.0.2.6", True),
        ("other,192.0.2.6", "192.0.2.6", True),
        ("192.0.2.*", "192.0.2.6", True),
        ("192.0.2.*,!192.0.2.6", "192.0.2.6", False),
        ("192.0.2.6", "[192.0.2.6]:2222", False),
        ("[192.0.2.6]:2222", "[192.0.2.6]:2222", True),
        ("[192.0.2.?]:*", "[192.0.2.6]:2222", True),
        ("PVE.Example", "pve.example", True),
        ("|1|broken", "192.0.2.6", False),
    ],
)
def test_patterns(tmp_path: Path, keys: dict[str, bytes], patterns: str, name: str, hit: bool) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("# a comment\n\nnonsense\nhost ssh-ed25519 !!!\n" + line(patterns, keys["one"]))
    found = knownhosts.look_up(name, [file])
    assert [k.line for k in found] == ([5] if hit else [])


def test_hashed_names_of_ssh_keygen(tmp_path: Path, keys: dict[str, bytes]) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("192.0.2.6", keys["one"]) + line("[192.0.2.7]:2222", keys["two"]))
    subprocess.run(["ssh-keygen", "-H", "-f", str(file)], check=True, capture_output=True, timeout=20)
    assert "192.0.2.6" not in file.read_text()
    assert judge(file, keys["one"])
    assert judge(file, keys["two"], "[192.0.2.7]:2222")


def test_an_authority_is_no_key_of_the_host_and_the_refusal_says_so(tmp_path: Path, keys: dict[str, bytes]) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("@cert-authority " + line("*.0.2.6", keys["one"]) + "@unheard-of " + line("*", keys["two"]))
    for shown in keys.values():  # not even the authority's own key
        with pytest.raises(HostKeyUnknown) as caught:
            judge(file, shown)
        assert f"{file}:1 (@cert-authority) is not used" in caught.value.next
        assert "--accept-new" in caught.value.next
    assert judge(file, keys["two"], accept_new=True) is False


def test_unknown_is_refused_with_its_fingerprint_and_taken_on_request(tmp_path: Path, keys: dict[str, bytes]) -> None:
    file = tmp_path / "new" / "known_hosts"
    with pytest.raises(HostKeyUnknown) as caught:
        judge(file, keys["one"])
    assert knownhosts.fingerprint(keys["one"]) in caught.value.what
    assert "--accept-new" in caught.value.next
    assert judge(file, keys["one"], accept_new=True) is False
    knownhosts.remember("192.0.2.6", "ssh-ed25519", keys["one"], file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert judge(file, keys["one"])


def test_a_changed_key_is_refused_with_both_fingerprints_always(tmp_path: Path, keys: dict[str, bytes]) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("192.0.2.6", keys["one"]))
    for accept_new in (False, True):
        with pytest.raises(HostKeyChanged) as caught:
            judge(file, keys["two"], accept_new=accept_new)
        for name in keys:
            assert knownhosts.fingerprint(keys[name]) in caught.value.what
        assert f"{file}:1" in caught.value.where


def test_a_revoked_key_is_refused_also_where_it_is_known(tmp_path: Path, keys: dict[str, bytes]) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("192.0.2.6", keys["one"]) + "@revoked " + line("*", keys["one"]))
    with pytest.raises(HostKeyChanged, match="revoked"):
        judge(file, keys["one"], accept_new=True)
    # a host certificate authority is no key of the host
    file.write_text("@cert-authority " + line("*", keys["two"]))
    with pytest.raises(HostKeyUnknown):
        judge(file, keys["one"])


def test_a_line_is_added_to_a_file_without_a_last_newline(tmp_path: Path, keys: dict[str, bytes]) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("192.0.2.7", keys["two"]).rstrip("\n"))
    knownhosts.remember("192.0.2.6", "ssh-ed25519", keys["one"], file)
    assert judge(file, keys["one"])
    assert judge(file, keys["two"], "192.0.2.7")


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, keys: dict[str, bytes]) -> None:
    (tmp_path / "known_hosts").mkdir()
    with pytest.raises(DflashError, match="cannot be written"):
        knownhosts.remember("192.0.2.6", "ssh-ed25519", keys["one"], tmp_path / "known_hosts")
