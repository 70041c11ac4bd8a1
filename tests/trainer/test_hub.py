"""Targets by hub id: from the cache, from a hub on loopback, and what is said where neither has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_parts import save_words
from demo_parts import environment

from trainer.errors import ConfigError
from trainer.hub import find, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, sys
from trainer.errors import ConfigError
from trainer.hub import find
for path, revision, weights in json.loads(sys.argv[1]):
    try:
        found = find(path, revision, weights=weights)
        print(json.dumps({"folder": found.folder, "whole": found.whole, "note": found.note}))
    except ConfigError as error:
        print(json.dumps({"what": error.what, "where": error.where, "next": error.next}))
"""


class Hub(ThreadingHTTPServer):
    """As much of a hub as a download asks for. `org/small` has the files of a folder; other names are refused."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.broken: set[str] = set()
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "/org/gated" in path:
            self.send(403, b"{}", X_Error_Code="GatedRepo")
        elif "/org/small" not in path:
            self.send(401, b"{}", X_Error_Code="RepoNotFound")
        elif path.startswith("/api/models/org/small/revision/"):
            if path.rpartition("/")[2] not in ("main", "v1", COMMIT):
                self.send(404, b"{}", X_Error_Code="RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in self.server.files]
            self.send(200, json.dumps({"id": "org/small", "sha": COMMIT, "siblings": siblings}).encode())
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{i:040x}"}
                for i, (name, data) in enumerate(self.server.files.items())
            ]
            self.send(200, json.dumps(tree).encode())
        else:
            name = path.rpartition("/")[2]
            if name in self.server.broken:
                self.send(403, b"{}")
                return
            if self.command == "GET":
                self.server.sent.append(name)
            tag = f'"{abs(hash(name)):x}"'
            self.send(200, self.server.files[name], X_Repo_Commit=COMMIT, ETag=tag)

    def send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tiny_target: Path, tmp_path: Path) -> Iterator[Hub]:
    folder = save_words(tmp_path / "words")
    files = {f.name: f.read_bytes() for place in (tiny_target, folder) for f in place.iterdir()}
    files["README.md"] = b"not needed"
    server = Hub(files)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(url: str, home: Path, *calls: tuple[str, str | None, bool], **env: str) -> list[dict[str, Any]]:
    """`find` for each call, in one fresh process with a cache of its own."""
    clean = {k: v for k, v in environment().items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    clean |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "*", **env}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)], env=clean, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_target_is_fetched_once_and_then_taken_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    small, whole, again = ask(
        hub.url, tmp_path / "home", ("org/small", None, False), ("org/small", None, True), ("org/small", "v1", True)
    )
    assert not small["whole"] and "weights of org/small are not on this machine yet" in small["note"]
    assert whole["whole"] and whole["folder"] == again["folder"] and COMMIT in whole["note"]
    folder = Path(whole["folder"])
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not (folder / "README.md").exists()
    assert sorted(hub.sent) == sorted(set(hub.sent)), "a file was fetched twice"
    hub.shutdown()
    hub.server_close()
    # Now without a hub: what is there is taken without asking, what is not is told.
    kept, pinned, other = ask(
        hub.url, tmp_path / "home", ("org/small", None, True), ("org/small", COMMIT, True), ("org/none", None, True)
    )
    assert kept["folder"] == pinned["folder"] == whole["folder"]
    assert "org/none could not be fetched: no answer from the hub at http://127.0.0.1:" in other["what"]
    assert "hf download org/none" in other["next"] and str(tmp_path / "home") in other["next"]
    offline, missing = ask(
        hub.url, tmp_path / "home", ("org/small", None, True), ("org/none", "v2", True), HF_HUB_OFFLINE="1"
    )
    assert offline["folder"] == whole["folder"]
    assert missing["what"] == (
        "org/none, revision v2 is not on this machine, "
        "and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids asking the hub"
    )
    assert "hf download org/none --revision v2" in missing["next"]


def test_what_the_hub_refuses_is_told_apart(hub: Hub, tmp_path: Path) -> None:
    gated, private, revision = ask(
        hub.url, tmp_path / "home", ("org/gated", None, True), ("org/private", None, True), ("org/small", "v9", True)
    )
    assert "only to accounts that accepted its terms" in gated["what"] and "HF_TOKEN" in gated["next"]
    assert "knows no org/private, or shows it only with a token" in private["what"]
    assert revision["what"] == "org/small has no revision v9" and "target.revision" in revision["where"]


def test_a_fetch_that_was_interrupted_is_taken_up_again(hub: Hub, tmp_path: Path) -> None:
    hub.broken.add("model.safetensors")
    (broken,) = ask(hub.url, tmp_path / "home", ("org/small", None, True))
    assert "org/small could not be fetched" in broken["what"]
    hub.broken.clear()
    (whole,) = ask(hub.url, tmp_path / "home", ("org/small", None, True))
    assert (Path(whole["folder"]) / "model.safetensors").exists()
    assert hub.sent.count("config.json") <= 1


def test_a_run_takes_its_target_and_its_tokenizer_by_id(hub: Hub, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hey you"}]
    data.write_text(json.dumps({"messages": talk}) + "\n")
    config = tmp_path / "run.json"
    drafter = {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": 259}
    tables = {"target": {"path": "org/small", "revision": "v1"}, "data": {"path": str(data), "tokenizer": "org/small"}}
    config.write_text(json.dumps({**tables, "drafter": drafter}))
    clean = {k: v for k, v in environment().items() if not k.startswith("HF_")}
    clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
    command = [sys.executable, "-m", "trainer", "check", "--config", str(config)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["samples"] == 1, report
    assert "the weights of org/small are not on this machine yet" in " ".join(report["notes"])
    assert "model.safetensors" not in hub.sent


def test_folders_are_no_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert is_hub_id("org/other") and not is_hub_id("org/name")
    for path in ("/org/name", "./org", "../org/name", "org", "org/a/b", "~/org", "org/.hidden", "org/na me", ""):
        assert not is_hub_id(path), path
    assert find("org/name", None).folder == "org/name"
    for path in ("models/qwen3--8b", "models/a..b", "models/" + 100 * "x"):
        with pytest.raises(ConfigError, match="no such folder, and this is no hub id") as caught:
            find(path, None, key="data.tokenizer")
        assert caught.value.where == f"data.tokenizer = {path}"
    with pytest.raises(ConfigError, match="a revision belongs to a hub id"):
        find(os.fspath(tmp_path), "v1")
