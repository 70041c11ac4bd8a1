"""The journal, releases, checkpoints set aside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resident_lab import Lab

from dflash_ops.contracts import FileEntry, Layout, Release, Snapshot, State, dumps, from_dict, release_id
from dflash_ops.resident import journal
from dflash_ops.resident.aside import aside
from dflash_ops.resident.files import write_atomic
from dflash_ops.resident.logs import _last_lines
from dflash_ops.resident.scan import LINE, Lines, LogScanner
from dflash_ops.resident.watch import Watcher

#: Files under run/ that a look reads.
FILES = {"journal.jsonl", "snapshot.json"} | {
    f"attempts/1/{name}"
    for name in ("job.json", "start.json", "stop.json", "exit.json", "log", "metrics.jsonl", "errors/w/error.json")
}


def test_a_journal_cut_at_every_byte_reads_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number in range(3):
        journal.append(path, "note", data={"text": f"ä{number}"})
    whole = path.read_bytes()
    before = journal.read(path)[0]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept, torn = journal.read(path)
        assert kept == before[: len(kept)]
        assert len(kept) >= whole[:cut].count(b"\n")
        done = journal.append(path, "note", data={"after": cut})
        events, still_torn = journal.read(path)
        assert events[: len(kept)] == kept
        assert events[-1] == done
        assert [e.seq for e in events] == list(range(1, len(events) + 1))
        healed = events[len(kept) : -1]
        cut_inside = cut > 0 and whole[cut - 1 : cut] != b"\n"
        assert [e.event for e in healed] == (["torn_line"] if cut_inside else [])
        assert still_torn == torn


def test_many_writers_make_one_journal(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from dflash_ops.resident import journal
for number in range(20):
    journal.append(Path(sys.argv[1]), "note", actor=sys.argv[2], data={"n": number})
"""
    path = tmp_path / "journal.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(4)]
    assert [w.wait(60) for w in writers] == [0] * 4
    events, torn = journal.read(path)
    assert torn == 0
    assert [e.seq for e in events] == list(range(1, 81))
    for n in range(4):
        assert [e.data["n"] for e in events if e.actor == str(n)] == list(range(20))


def test_the_journals_two_faces(one: Lab) -> None:
    said = one.ok("record", "--event", "deployed", "--actor", "me", stdin='{"release": "abc"}')
    assert (said["event"]["seq"], said["event"]["data"]) == (1, {"release": "abc"})
    one.ok("record", "--event", "note")
    answer = one.ok("journal", "--json", "--last", "1")
    assert (answer["kind"], [e["event"] for e in answer["events"]], answer["torn_lines"]) == ("journal", ["note"], 0)
    assert [e["event"] for e in one.ok("journal", "--json")["events"]] == ["deployed", "note"]
    text = one.run("journal").out.decode()
    assert 'me: deployed {"release":"abc"}' in text
    assert one.run("record", "--event", "attempt_exited").rc == 2
    assert one.run("record", "--event", "note", stdin="[]").error["type"] == "ContractError"
    assert one.run("nonsense").error["type"] == "UsageError"


def _release(one: Lab, text: str) -> str:
    entry = FileEntry("a.py", 0o644, len(text), "0" * 64 if not text else text.ljust(64, "0"))
    id = release_id((entry,))
    folder = one.layout.release(id)
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(text)
    (folder / ".release.json").write_text(dumps(Release(id, (entry,))))
    return id


def test_current_is_switched_only_to_a_whole_release(one: Lab) -> None:
    first, second = _release(one, "1"), _release(one, "2")
    assert one.ok("activate", "--release", first) == {"schema": 1, "release": first, "previous": None}
    assert one.ok("activate", "--release", second)["previous"] == first
    assert one.layout.current.readlink() == Path("releases") / second
    assert (one.layout.current / "a.py").read_text() == "2"
    (one.layout.release(first) / "a.py").unlink()
    refused = one.run("activate", "--release", first)
    assert refused.error["type"] == "ReleaseError"
    assert "a.py" in refused.error["what"]
    assert one.run("activate", "--release", "nope").error["type"] == "ReleaseError"
    assert one.run("activate", "--release", "../x").error["type"] == "UsageError"
    assert one.layout.current.readlink().name == second
    assert [e.data["release"] for e in one.events("activated")] == [first, second]
    assert one.ok("activate", "--release", second)["previous"] == second
    assert len(one.events("activated")) == 2


def test_checkpoints_are_moved_whole_and_come_back_with_one_command(one: Lab) -> None:
    folder = one.root / "checkpoints"
    (folder / "step-00000100").mkdir(parents=True)
    (folder / "step-00000100" / "weights").write_bytes(b"w" * 1000)
    (folder / "latest").symlink_to("step-00000100")
    said = one.ok("aside", "--reason", "bad split")
    assert (said["moved"], said["files"], said["from"]) == (True, 2, str(folder))
    assert list(folder.iterdir()) == []
    moved = Path(said["to"])
    assert moved.parent.parent == one.layout.aside
    assert (moved / "step-00000100" / "weights").read_bytes() == b"w" * 1000
    manifest = json.loads((moved.parent / "manifest.json").read_text())
    assert manifest["reason"] == "bad split"
    sizes = {f["path"]: f["size"] for f in manifest["files"]}
    assert sizes["step-00000100/weights"] == 1000
    assert one.events("checkpoints_aside")[0].data["reason"] == "bad split"
    assert one.ok("aside", "--reason", "again")["moved"] is False
    subprocess.run(["sh", "-c", manifest["restore"]], check=True)
    assert (folder / "step-00000100" / "weights").exists()
    again = aside(one.layout, "once more")
    assert again["moved"] and again["to"] != said["to"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, b"old")
    with pytest.raises(OSError, match="File name too long"):
        write_atomic(tmp_path / ("n" * 300), b"new")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "d").mkdir()
        write_atomic(tmp_path / "d", b"new")
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "x.json"]


def test_last_lines_over_block_borders(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"%d:" % n + b"x" * (n * 37 % 4000) for n in range(200)]
    for end in (b"\n", b""):
        path.write_bytes(b"\n".join(lines) + end)
        raw = path.read_bytes()
        with path.open("rb") as file:
            for count in (1, 2, 3, 50, 199, 200, 201):
                assert raw[_last_lines(file.fileno(), count) :] == b"\n".join(lines[-count:]) + end
            assert _last_lines(file.fileno(), 0) == len(raw)


def test_lines_survive_any_cut_bars_and_endless_lines() -> None:
    raw = b"a\r\nb\rc\n" + b"y" * (3 * LINE) + b"\nend\n"
    whole = Lines().feed(raw)
    assert [x[:3] for x in whole] == [b"a", b"b", b"c", b"yyy", b"end"]
    for size in (500, 1001, LINE + 1):  # one byte at a time is below
        lines = Lines()
        found = [x for at in range(0, len(raw), size) for x in lines.feed(raw[at : at + size])]
        assert [x[:3] for x in found if x] == [b"a", b"b", b"c", b"yyy", b"end"]
        assert max(map(len, found)) <= 3 * LINE
    lines = Lines()
    assert [x for byte in b"a\r\nb\rc\n" for x in lines.feed(bytes([byte])) if x] == [b"a", b"b", b"c"]


def test_colours_and_rank_prefixes_do_not_hide_progress() -> None:
    scanner = LogScanner(None)
    scanner.feed(b"\x1b[32m[drafter0]:\x1b[0mdflash step=5/9 loss=1.5\x1b[0m\n", 10.0)
    assert scanner.progress is not None
    assert (scanner.progress.step, scanner.progress.loss) == (5, 1.5)
    events = scanner.feed(b"dflash event=checkpoint step=5 path=checkpoints/step-00000005\n", 11.0)
    assert [(e.name, e.line.integer("step")) for e in events] == [("checkpoint", 5)]
    assert scanner.progress.step == 5


GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [b"[" * 5000, b'{"t": NaN}\n', b'{"t": 1e999, "step": 1}\n', b'{"t": 1, "step": 1, "workers": [1]}\n']
    ),
    st.dictionaries(
        st.sampled_from(["t", "step", "message", "workers", "life"]), st.floats() | st.text(max_size=5)
    ).map(lambda d: json.dumps(d).encode() + b"\n"),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(FILES)), GARBAGE))
def test_no_garbage_in_any_file_breaks_a_look(tmp_path: Path, files: dict[str, bytes]) -> None:
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    layout = Layout(root)
    (layout.attempt(1).errors / "w").mkdir(parents=True)
    for name, data in files.items():
        (root / "run" / name).write_bytes(data)
    snapshot = Watcher(layout).look(None)
    assert snapshot.state in (State.UNKNOWN, State.CRASHED)
    again = from_dict(Snapshot, json.loads(dumps(snapshot)))
    assert again.state is snapshot.state
    Watcher(layout, again).look(None)
