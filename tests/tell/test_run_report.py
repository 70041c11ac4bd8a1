"""A report: one file that needs nothing, shows what there is, says what there is not, and holds no secret."""

from __future__ import annotations

import json
import math
import random
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from schemas import valid  # type: ignore[import-not-found]

from dflash_ops.client import History, Seen
from dflash_ops.contracts import Snapshot, from_dict
from dflash_ops.errors import ContractError, DflashError
from dflash_ops.resident import history
from dflash_ops.resident.thin import MOST, Thin
from dflash_ops.tell.page import page
from dflash_ops.tell.report import HIDDEN, build, cleared, config
from dflash_ops.tell.svg import At, Curve, chart, ticks

DATA = Path(__file__).resolve().parents[1] / "data"


class Page(HTMLParser):
    """An html text, its tags balanced; what it shows, and every place that could ask for something elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.asks: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.asks += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "action", "style", "srcset")]
        self.asks += [f"{k}={v}" for k, v in attrs if k.startswith("on")]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def pictures(text: str) -> list[ET.Element]:
    """All its SVGs, each a well-formed document, with every coordinate a finite number."""
    found = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    for svg in found:
        for element in svg.iter():
            for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                assert math.isfinite(float(element.get(name, "0")))
            for number in re.findall(r"[\w.+-]+", element.get("points", "")):
                assert math.isfinite(float(number))
    return found


class Root:
    """A job's folder as its resident leaves it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        (folder / "run").mkdir(parents=True)
        (folder / "run/journal.jsonl").write_bytes((DATA / "incidents/journal.jsonl").read_bytes())

    def attempt(self, number: int, records: list[dict[str, Any]] | None, *, log: str = "", **spec: Any) -> Path:
        at = self.path / f"run/attempts/{number}"
        at.mkdir(parents=True)
        job = {"schema": 1, "job": "main", "root": str(self.path), "session": "s", "checkpoints": "checkpoints"}
        job |= {"argv": ["python", "train.py"], **spec}
        process = {"pid": 1 << 30, "start": 1}
        began = 1000.0 * number
        start = {"schema": 1, "attempt": number, "job": "main", "release": "0a1b2c3d4e5f", "argv": ["python"],
                 "cwd": "/", "env_names": [], "overrides": {"train.lr": "3e-4"}, "reason": "again", "boot_id": "b",
                 "t": began, "cache_dir": "", "wrapper": process, "launcher": process}  # fmt: skip
        ended = {"schema": 1, "attempt": number, "rc": 1, "signal": None, "requested": None, "t": began + 900,
                 "duration_s": 900.0, "log_bytes": 0, "log_lost_bytes": 0, "detail": ""}  # fmt: skip
        for name, value in (("job", job), ("start", start), ("exit", ended)):
            (at / f"{name}.json").write_text(json.dumps(value))
        (at / "log").write_text(log)
        if records is not None:
            (at / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return at

    def history(self, capsys: pytest.CaptureFixture[str], *options: str) -> History:
        assert history.main(["--root", str(self.path), *options]) == 0
        head, *told, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert end == {"end": True, "attempts": len(told)}
        return History(head, tuple(told))


def made(found: History, *, job: str = "main", seen: Seen | None = None) -> tuple[dict[str, Any], str]:
    report = build(found, seen, host="gpu", root="/srv/main", job=job, made=1.8e9)
    valid("report", json.loads(json.dumps(report, allow_nan=False)))
    text = page(report)
    shown = Page(text)
    assert shown.asks == []
    assert not shown.tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    assert "url(http" not in text
    assert "@import" not in text
    return report, text


def record(step: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    shares = {"wait": 0.25, "compute": 0.5, "copy": 0.25, "sync": 0.0, "life": 0}
    return {"t": 1000.0 + step, "step": step, "total": 5000, "epoch": 0.5, "loss": loss, "tau": 3.0, "block_tok_s": 1e4,
            "lr": 1e-3, "life": 0, "samples": 16 * step, "workers": {"target0": shares}, **more}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "main")


def test_a_repaired_night_is_shown_with_all_attempts(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3, 4):
        root.attempt(number, [record(s) for s in range(10 * number, 10 * number + 30)])
    snapshot = from_dict(Snapshot, json.loads((DATA / "contracts/snapshot_watch.json").read_text()))
    report, text = made(root.history(capsys, "--all"), seen=Seen(snapshot, snapshot.t))
    shown = Page(text).text
    for word in ("attempts 1 to 4", "A compiled function was called while FX was tracing",
                 "workers_processes: verified", "it did not help", "over: attempt 3 reached step 25",
                 "train.lr=3e-4", "Learning rate", "target0",
                 "Who waits for whom", "GPUs now", snapshot.gpus[0].name):  # fmt: skip
        assert word in shown, word
    titles = [svg.findtext("title") for svg in pictures(text)]
    assert titles[:3] == ["Loss", "Tau: accepted tokens a forward", "Tokens a second"]
    assert titles[-1] == "Attempts and what happened"
    loss = pictures(text)[0]
    assert len(loss.findall(".//polyline")) == 4  # a line for each attempt, none across two of them
    assert len(loss.findall(".//line[@class='attempt']")) == 4
    assert [m.text for m in loss.findall(".//path[@class='incident']/title")] == [
        "1: A compiled function was called while FX was tracing", "2: A process was killed by signal 9",
        "3: An error that no playbook names",
    ]  # fmt: skip
    assert [one["number"] for one in report["incidents"]] == [1, 2, 3]
    one, _ = made(root.history(capsys, "--attempt", "3"))
    assert ([a["attempt"] for a in one["attempts"]], one["attempts_there"]) == ([3], 4)
    assert [i["number"] for i in one["incidents"]] == [2]
    assert [a["attempt"] for a in made(root.history(capsys))[0]["attempts"]] == [4]


def test_losses_that_are_none_gaps_and_restarts_break_the_line_and_are_said(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [record(s) for s in range(100)]
    lines[40]["loss"], lines[41]["loss"], lines[42]["loss"] = float("nan"), float("inf"), None
    lines[60:] = [{**r, "step": r["step"] - 5, "life": 1} for r in lines[60:]]
    lines += [record(s) for s in range(1000, 1020)]
    at = root.attempt(1, lines)
    with (at / "metrics.jsonl").open("a") as file:
        file.write(
            'no json\n[1]\n{"step": "x"}\n{"step": 1020, "t": 2020.0, "loss": 1.5}'
        )  # the last one without its end
    report, text = made(root.history(capsys))
    course = report["attempts"][0]["course"]
    assert course["not_finite"] == {"loss": {"count": 3, "step": 40}}
    assert (course["lives_count"], course["gaps_count"], course["bad_lines"]) == (1, 1, 3)
    assert course["last"]["step"] == 1020
    loss, tau = pictures(text)[:2]
    # 0-39, 43-59 | 55-94 (another life) | 1000-1020 (a gap)
    assert len(loss.findall(".//polyline")) == 4
    assert len(tau.findall(".//polyline")) == 3
    assert len(loss.findall(".//text[@class='odd middle']")) == 1
    shown = Page(text).text
    for word in ("loss is no finite number in 3 lines of 121, first at step 40", "earlier step, 1 time.",
                 "no line came for long 1 time", "3 lines could not be understood"):  # fmt: skip
        assert word in shown, word


def test_a_foreign_trainer_has_what_its_lines_say(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    log = "".join(f"it {s} of 50 loss={3 - s / 50}\r" for s in range(30)) + "it 30 of 50 loss=nan\nend"
    root.attempt(1, None, log=log, progress=r"it (?P<step>\d+) of (?P<total>\d+) loss=(?P<loss>\S+)", argv=["train"])
    report, text = made(root.history(capsys))
    course = report["attempts"][0]["course"]
    assert (course["source"], course["lines"], course["not_finite"]) == ("log", 31, {"loss": {"count": 1, "step": 30}})
    assert [svg.findtext("title") for svg in pictures(text)] == ["Loss", "Attempts and what happened"]
    assert "30 of 50" in Page(text).text


def test_an_attempt_that_told_nothing(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root.attempt(1, [])
    _, text = made(root.history(capsys))
    assert "it told no step." in Page(text).text
    assert "nothing to draw" in Page(text).text
    (root.path / "run/attempts/2").mkdir()  # not even its start was written down
    _, text = made(root.history(capsys, "--all"))
    pictures(text)


def test_texts_of_others_stay_texts_and_secrets_stay_out(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31m\u2028"
    toml = '[target]\nhub_token = "s3cret1"\nmodel = "a<b>"\n[train]\nmax_tokens = 4096\n'
    lines = [record(s, workers={odd: {"wait": 1.0, "compute": 0, "copy": 0, "sync": 0}}) for s in range(5)]
    root.attempt(
        1, lines, files={"run.toml": toml}, argv=["python", "--api-key", "s3cret2"], env={"HF_TOKEN": "s3cret3"}
    )
    events = root.path / "run/journal.jsonl"
    said = [json.loads(line) for line in events.read_text().splitlines()]
    for event in said:
        if event["event"] == "attempt_exited":
            event["data"]["detail"] = f"{odd} HF_TOKEN=s3cret4"
        if event["event"] == "action_intended":
            event["data"]["decision"]["command"] = (
                "start: WANDB_API_KEY=s3cret5 python train.py --hub-token s3cret6 --lr 1"
            )
    events.write_text("".join(json.dumps(event) + "\n" for event in said))
    report, text = made(root.history(capsys), job=odd)
    assert "s3cret" not in text
    assert "s3cret" not in json.dumps(report)
    assert "alert(1)" in Page(text).text
    assert "\x1b" not in text
    values = report["config"]["values"]
    assert values == {"target.hub_token": HIDDEN, "target.model": "a<b>", "train.max_tokens": "4096"}
    assert report["config"]["env"] == ["HF_TOKEN"]
    assert "--lr 1" in json.dumps(report)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("HF_TOKEN=abc python x", "HF_TOKEN=(not shown) python x"),
        ("--password 'a b' --steps 5", "--password (not shown) --steps 5"),
        ('{"api_key": "abc"}', '{"api_key": (not shown)}'),
        ("got hf_abcdefghijklmnopqrst here", "got (not shown) here"),
        (
            "max_tokens=4096 tokens 5 tokenizer=x mask_token_id=7",
            "max_tokens=4096 tokens 5 tokenizer=x mask_token_id=7",
        ),
        ("--token --verbose", "--token --verbose"),
    ],
)
def test_what_looks_like_a_secret(text: str, kept: str) -> None:
    assert cleared(text) == kept


def test_secrets_are_looked_for_in_time_that_grows_with_the_text_only() -> None:
    for piece in ("a", "token", "token ", "sk-", "secret=", '"', 'api_key" '):
        assert len(cleared(piece * 200_000)) > 10  # a search that grows faster would take hours


def test_lines_of_any_kind_make_a_report(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers at the edges of a double, other types, clocks that jump: always a page, always JSON."""
    dice = random.Random(5)
    odd = [None, True, "x", [], {}, -1, 0, 1, 10**400, 1e308, -1e308, math.nan, math.inf, 5e-324, 2**60, "\ud800"]

    def value() -> Any:
        return dice.choice(odd) if dice.random() < 0.6 else dice.uniform(-10, 10)

    for number in range(1, 16):
        lines = []
        for _ in range(dice.randint(0, 150)):
            line = {k: value() for k in ("t", "life", "loss", "tau", "lr", "rate", "samples") if dice.random() < 0.7}
            line["step"] = value() if dice.random() < 0.2 else dice.randint(0, 500)
            line["workers"] = dice.choice([value(), {"w": {s: value() for s in ("wait", "compute", "copy", "sync")}}])
            lines.append(line)
        root.attempt(number, lines)
    _, text = made(root.history(capsys, "--all", "--points", "20"))
    assert len(pictures(text)) >= 5


def test_many_lines_become_few_points_in_bounded_memory() -> None:
    thin = Thin(100)
    most = 0
    for step in range(50_000):
        thin.add(record(step, loss=float(step % 7), workers={}))
        most = max(most, len(thin._points))
    points = thin.points()
    assert most <= 200
    assert len(points) <= 100
    assert sum(p["lines"] for p in points) == thin.lines == 50_000
    assert [points[0]["step"][0], points[-1]["step"][1]] == [0, 49_999]
    assert all(p["loss"][1:] == [0.0, 6.0] and abs(p["loss"][0] - 3.0) < 0.1 for p in points)
    # a trainer whose lives never end makes no list longer than another
    thin = Thin(100)
    for n in range(5_000):
        thin.add(record(n % 3, life=n // 3, workers={f"w{n}": {"wait": 1.0, "compute": 0, "copy": 0, "sync": 0}}))
    assert len(thin.points()) <= 100
    assert len(thin.lives) == MOST < thin.lives_count
    assert len({name for p in thin.points() for name in p.get("workers", ())}) <= 64


def test_a_huge_file_is_read_in_evenly_spaced_parts(
    root: Root, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root.attempt(1, [record(s) for s in range(20_000)])
    monkeypatch.setattr(history, "MOST", 200_000)
    monkeypatch.setattr(history, "PARTS", 10)
    monkeypatch.setattr(history, "BLOCK", 4096)
    report, text = made(root.history(capsys))
    course, points = report["attempts"][0]["course"], report["attempts"][0]["points"]
    assert 0.02 < course["read"] < 0.1
    assert 200 < course["lines"] < 2_000
    assert points[-1]["step"][1] == 19_999
    assert course["bad_lines"] == 0  # lines that are cut by a part's ends are not bad ones
    assert sum(bool(p.get("cut")) for p in points) == 9
    assert "in evenly spaced parts" in Page(text).text


def test_answers_that_are_none(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DflashError, match="nothing was ever started"):
        history.main(["--root", str(root.path)])
    root.attempt(1, [record(1)])
    with pytest.raises(DflashError, match="there is no attempt 7"):
        history.main(["--root", str(root.path), "--attempt", "7"])
    good = root.history(capsys)
    for key in ("events", "now", "job", "attempts_there"):
        head = {k: v for k, v in good.head.items() if k != key}
        with pytest.raises(ContractError):
            build(History(head, good.attempts), None, host="h", root="/r", job="j", made=0.0)
    with pytest.raises(ContractError):
        build(History(good.head, ({"attempt": 1},)), None, host="h", root="/r", job="j", made=0.0)
    assert "cannot be understood" in config({"run_toml": "= ="})["fault"]


def test_axes_and_charts_of_odd_numbers() -> None:
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(5.0, 5.0) == [5.0]
    assert len(ticks(-1e-300, 1e300)) <= 20
    for ys in ([1.0], [0.0, 0.0], [1e-300, 1e300], [-1e308, 1e308], [2.0] * 99 + [1e9]):
        text, _ = chart("x", [Curve("a", [[At(n, y, y, y) for n, y in enumerate(ys)]])], (0.0, 0.0))
        pictures(text)
    _, outside = chart("x", [Curve("a", [[At(n, y, y, y) for n, y in enumerate([*range(99), 1e9])]])], (0.0, 99.0))
    assert outside == 1
