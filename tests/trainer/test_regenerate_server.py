"""Responses by a server: every fault that passes is outlived, every other one is named, and nothing is lost."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_parts import save_words
from chat_server import ChatServer
from demo_parts import LIMIT, call, call_apart, start

import trainer.openai_client as client_module
import trainer.regenerate_server as server_module
from trainer.config import DataConfig
from trainer.corpus import open_corpus
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.openai_client import Server
from trainer.regenerate_server import Outcome, Sampling, regenerate_from_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    with ChatServer() as made:
        yield made


def write_prompts(path: Path, *questions: str) -> Path:
    lines = [json.dumps({"messages": [{"role": "user", "content": q}]}) for q in questions]
    path.write_text("\n".join(lines) + "\n")
    return path


def ask(server: ChatServer | str, prompts: Path, out: Path, **more: Any) -> Outcome:
    url = server if isinstance(server, str) else server.url
    connection = {k: more.pop(k) for k in ("key", "timeout_s", "retries") if k in more}
    sampling = {k: more.pop(k) for k in ("temperature", "top_p", "seed", "template_options") if k in more}
    return regenerate_from_server(
        Server(url, **{"timeout_s": 30.0, "retries": 3, **connection}),
        Sampling("t", 64, **sampling),
        prompts,
        out,
        **more,
    )


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def answers(out: Path) -> dict[int, str]:
    found = [(row["line"], row["messages"][-1]["content"]) for row in rows(out)]
    assert len(dict(found)) == len(found), "an answer was doubled"
    return dict(found)


QUESTIONS = [f"q{n}" for n in range(40)]
ALL = {n: f"re: q{n}" for n in range(40)}


def test_answers_are_training_data_in_the_prompts_order(server: ChatServer, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", *QUESTIONS), tmp_path / "out.jsonl"
    server.delay_s = 0.2
    told: list[tuple[int, int]] = []
    outcome = ask(server, prompts, out, concurrency=8, progress=lambda *a: told.append(a))
    assert answers(out) == ALL and [r["line"] for r in rows(out)] == list(range(40))
    assert 4 <= server.most <= 8 and server.connections <= 8
    assert outcome.made == 40 and told[-1] == (40, 200) and [d for d, _ in told] == list(range(1, 41))
    target = save_words(tmp_path / "target")
    index = open_corpus(DataConfig(path=str(out)), str(target), 260, tmp_path / "kept").index
    assert len(index.ids) == 40
    assert ask(server, prompts, out).made == 0 and server.asked.total() == 40


def test_a_file_that_was_left_in_no_order_is_ordered_by_the_next_call(server: ChatServer, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", *QUESTIONS), tmp_path / "out.jsonl"
    ask(server, prompts, out)
    whole = out.read_bytes()
    out.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))  # the disk was full in the last step
    assert ask(server, prompts, out).made == 0
    assert out.read_bytes() == whole


def test_faults_that_pass_are_asked_again(server: ChatServer, tmp_path: Path) -> None:
    kinds = [
        "429",
        "500",
        "502",
        "503",
        "504",
        "408",
        "cut",
        "half",
        "wait 0",
        "wait Mon, 01 Jan 2024 00:00:00 GMT",
        "wait x",
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", *QUESTIONS)
    for n, kind in enumerate(kinds):
        server.faults[f"q{n}"] = [kind] * 2
    assert ask(server, prompts, tmp_path / "out.jsonl", concurrency=4).bad.total() == 0
    assert answers(tmp_path / "out.jsonl") == ALL
    assert [server.asked[f"q{n}"] for n in range(len(kinds) + 1)] == [3] * len(kinds) + [1]


def test_what_the_server_asks_to_wait_is_waited(server: ChatServer, tmp_path: Path) -> None:
    server.faults["a"] = ["wait 0.7"]
    began = time.monotonic()
    ask(server, write_prompts(tmp_path / "p.jsonl", "a"), tmp_path / "out.jsonl")
    assert time.monotonic() - began >= 0.7


def test_a_connection_that_was_let_go_costs_no_try(server: ChatServer, tmp_path: Path) -> None:
    for question in QUESTIONS:
        server.faults[question] = ["goodbye"]
    prompts = write_prompts(tmp_path / "p.jsonl", *QUESTIONS)
    assert ask(server, prompts, tmp_path / "out.jsonl", concurrency=2, retries=0).bad.total() == 0
    assert answers(tmp_path / "out.jsonl") == ALL


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_no_request_outlives_its_deadline(server: ChatServer, tmp_path: Path, fault: str) -> None:
    server.faults["a"], server.faults["b"] = [fault], [fault] * 5
    prompts = write_prompts(tmp_path / "p.jsonl", "a", "b", "c")
    outcome = ask(server, prompts, tmp_path / "out.jsonl", timeout_s=2.0, retries=1)
    assert answers(tmp_path / "out.jsonl") == {0: "re: a", 2: "re: c"}
    assert outcome.bad == {"server fault": 1}
    assert outcome.named == [f"{prompts}:2: asked 2 times: no whole answer within 2 s"]


def test_a_deadline_that_passes_while_connecting_ends_the_request(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_connect, own_cut, passed = http.client.HTTPConnection.connect, client_module._cut, threading.Event()

    def cut(connection: http.client.HTTPConnection) -> None:
        own_cut(connection)
        passed.set()

    def slow(connection: http.client.HTTPConnection) -> None:
        assert passed.wait(LIMIT)
        own_connect(connection)

    monkeypatch.setattr(client_module, "_cut", cut)
    monkeypatch.setattr(http.client.HTTPConnection, "connect", slow)
    with pytest.raises(TrainerError, match=r"asked 1 times: no whole answer within 0\.2 s"):
        ask(server, write_prompts(tmp_path / "p.jsonl", "a"), tmp_path / "out.jsonl", timeout_s=0.2, retries=0)
    assert not server.asked


def test_threads_that_cannot_be_woken_are_waited_for_together(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_once, stuck, begun = client_module.Client._once, threading.Event(), threading.Semaphore(0)

    def once(client: client_module.Client, path: str, data: bytes) -> dict[str, Any]:
        if b"q0" in data:
            for _ in range(31):
                assert begun.acquire(timeout=LIMIT)
            return own_once(client, path, data)
        begun.release()
        stuck.wait(LIMIT)  # as in a name server that does not answer
        raise client_module.Stopped

    monkeypatch.setattr(client_module.Client, "_once", once)
    monkeypatch.setattr(server_module, "_JOIN_S", 1.0)
    server.faults["q0"] = ["404"]
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no such path"):
        ask(server, write_prompts(tmp_path / "p.jsonl", *QUESTIONS[:32]), tmp_path / "out.jsonl")
    stuck.set()
    assert 1.0 <= time.monotonic() - began < 20.0  # and not a second for each of the 31


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("empty", "empty", "the answer is empty"),
        ("null", "empty", "the answer is empty"),
        ("length", "cut", "cut at --max-new"),
        ("content_filter", "unfinished", "ended with 'content_filter'"),
        ("none", "unfinished", "ended with None"),
        ("torn", "no JSON", "bytes is no JSON"),
        ("html", "no JSON", "text/html, not application/json"),
        ("list", "no JSON", "no JSON object"),
        ("no choices", "malformed", "no choices[0]"),
        ("no text", "malformed", "content is no text"),
        ("tool", "tool call", "calls a tool"),
        ("400", "refused", "status 400: so it is"),
        ("413", "refused", "status 413"),
    ],
)
def test_bad_answers_are_named_counted_and_asked_again_later(
    server: ChatServer, tmp_path: Path, fault: str, kind: str, reason: str
) -> None:
    server.faults["b"] = [fault]
    prompts, out = write_prompts(tmp_path / "p.jsonl", "a", "b", "c"), tmp_path / "out.jsonl"
    outcome = ask(server, prompts, out)
    assert outcome.bad == {kind: 1} and outcome.made == 2
    assert outcome.named[0].startswith(f"{prompts}:2: ") and reason in outcome.named[0]
    assert answers(out) == {0: "re: a", 2: "re: c"} and server.asked["b"] == 1
    assert ask(server, prompts, out).made == 1
    assert answers(out) == {0: "re: a", 1: "re: b", 2: "re: c"} and list(answers(out)) == [0, 1, 2]


def test_too_many_bad_answers_end_it_and_keep_the_good_ones(server: ChatServer, tmp_path: Path) -> None:
    for n in range(20, 40):
        server.faults[f"q{n}"] = ["length"]
    prompts, out = write_prompts(tmp_path / "p.jsonl", *QUESTIONS), tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=r"4 bad answers \(4 cut\), 3 allowed") as caught:
        ask(server, prompts, out, concurrency=1, max_bad=3)
    assert caught.value.exit_code == 6 and f"{prompts}:21: " in caught.value.what
    assert answers(out) == {n: ALL[n] for n in range(20)}


@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        ("404", ConfigError, "no such path or model: status 404: so it is"),
        ("403", ConfigError, "wants a key: so it is"),
        ("302", ConfigError, "sends elsewhere"),
    ],
)
def test_what_no_retry_mends_ends_it_at_once(
    server: ChatServer, tmp_path: Path, fault: str, error: type[Exception], match: str
) -> None:
    server.faults["a"] = [fault]
    with pytest.raises(error, match=match):
        ask(server, write_prompts(tmp_path / "p.jsonl", "a"), tmp_path / "out.jsonl")
    assert server.asked["a"] == 1


def test_no_server_there(server: ChatServer, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(TrainerError, match=r"did not answer, asked 3 times: .*refused") as caught:
            ask(url, write_prompts(tmp_path / "p.jsonl", "a"), tmp_path / "out.jsonl", retries=2)
    assert url in caught.value.where and caught.value.exit_code == 1


def test_a_server_that_goes_away_and_comes_back(server: ChatServer, tmp_path: Path) -> None:
    """The call ends with an error that says so; the next one goes on."""
    prompts, out = write_prompts(tmp_path / "p.jsonl", *QUESTIONS), tmp_path / "out.jsonl"

    def go_away(done: int, _: int) -> None:
        if done == 10:
            server.server_close()
            server.shutdown()  # the connection that is open goes on until it is cut

    server.faults["q12"] = ["cut"] * 9
    with pytest.raises(TrainerError, match="did not answer"):
        ask(server, prompts, out, concurrency=1, progress=go_away, retries=1)
    assert 10 <= len(answers(out)) < 40
    with ChatServer() as other:
        outcome = ask(other, prompts, out)
        assert outcome.made == other.asked.total() == 40 - outcome.plan.done
    assert answers(out) == ALL


def test_killed_at_random_moments_nothing_is_lost_or_doubled(server: ChatServer, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", *QUESTIONS), tmp_path / "out.jsonl"
    server.delay_s = 0.4
    rng = random.Random(11)
    arguments = [
        "regenerate", "--server", server.url, "--model", "t", "--prompts", prompts, "--out", out, "--max-new", "64",
        "--concurrency", "4",
    ]  # fmt: skip
    kept: dict[int, str] = {}
    for more in (1, 8):
        process = start(*arguments)
        limit = time.monotonic() + LIMIT
        while not (out.exists() and out.read_bytes().count(b"\n") >= len(kept) + more) and time.monotonic() < limit:
            time.sleep(0.005)
        assert out.read_bytes().count(b"\n") >= len(kept) + more
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)
        raw = out.read_bytes()
        out.write_bytes(raw + b'{"line": 39, "mess')  # and a line that was half on disk
        now = {r["line"]: r["messages"][-1]["content"] for r in map(json.loads, raw.splitlines())}
        assert kept.items() <= now.items() and len(now) < 40
        kept = now
    server.delay_s = 0.0
    done = call(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert answers(out) == ALL and list(answers(out)) == list(range(40))
    assert json.loads(done.stdout.splitlines()[-1])["made"] == 40 - len(kept)
    assert f"going on: {len(kept)} of 40" in done.stderr


def test_every_turn_of_a_conversation_is_written_anew(server: ChatServer, tmp_path: Path) -> None:
    turns = [("system", "be"), ("human", "a"), ("gpt", "old"), ("human", "b"), ("gpt", "old too")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    talk = {"conversations": [{"from": f, "value": v} for f, v in turns], "tools": json.dumps(tools)}
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(talk) + "\n" + json.dumps({"messages": [{"role": "user", "content": "c"}]}) + "\n")
    server.faults["b"] = ["thinks"]
    ask(server, file, out, temperature=0.5, top_p=0.9, seed=3, template_options={"enable_thinking": False})
    assert rows(out)[0]["messages"] == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "re: a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    ]
    assert rows(out)[0]["tools"] == tools and "tools" not in rows(out)[1]
    second = next(b for b in server.bodies if b["messages"][-1]["content"] == "b")
    assert [m["content"] for m in second["messages"]] == ["be", "a", "re: a", "b"]
    assert {k: v for k, v in second.items() if k != "messages"} == {
        "model": "t", "max_tokens": 64, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": False,
        "chat_template_kwargs": {"enable_thinking": False}, "path": "/v1/chat/completions",
        "tools": tools,
    }  # fmt: skip


def test_plain_prompts_are_completed(server: ChatServer, tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "once"}\n')
    ask(server.url + "/v1/", file, out)
    assert rows(out) == [{"line": 0, "prompt": "once", "response": "re: once"}]
    assert server.bodies[0]["path"] == "/v1/completions"


def test_the_key_reaches_the_server_and_nobody_else(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "sk-" + random.randbytes(8).hex()
    prompts = write_prompts(tmp_path / "p.jsonl", "a")
    arguments = ["regenerate", "--server", server.url, "--model", "t", "--prompts", prompts, "--max-new", "9", "--out"]
    out, key = tmp_path / "out.jsonl", server.key
    monkeypatch.setenv("SOME_KEY", key)
    good = call_apart(*arguments, out, "--api-key-env", "SOME_KEY")
    assert good.returncode == 0 and answers(out) == {0: "re: a"}, good.stderr
    server.key = "another"  # the server repeats the wrong key in its error
    bad = call_apart(*arguments, tmp_path / "2.jsonl", "--api-key-env", "SOME_KEY")
    assert bad.returncode == 2 and "refuses the key: status 401: no such key: Bearer (key)" in bad.stderr
    none = call(*arguments, tmp_path / "3.jsonl")
    assert none.returncode == 2 and "wants a key" in none.stderr and "--api-key-env" in none.stderr
    monkeypatch.setenv("SOME_KEY", key + "\nx")
    broken = call(*arguments, tmp_path / "4.jsonl", "--api-key-env", "SOME_KEY")
    assert broken.returncode == 2 and "no header can carry" in broken.stderr
    unset = call(*arguments, tmp_path / "5.jsonl", "--api-key-env", "ABSENT_KEY")
    assert unset.returncode == 2 and "ABSENT_KEY" in unset.stderr
    everything = [good, bad, none, broken, unset]
    assert not any(key in p.stdout + p.stderr for p in everything)
    assert not [f for f in tmp_path.iterdir() if f.is_file() and key.encode() in f.read_bytes()]
    assert key not in repr(Server(server.url, key))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--server", "host:80", "--model", "t"], "no URL of a server"),
        (["--server", "http://u:secret@127.0.0.1:1", "--model", "t"], "more than a host and a path"),
        (["--server", "http://127.0.0.1:1/?a=1", "--model", "t"], "more than a host and a path"),
        (["--server", "http://127.0.0.1:1"], "--model is missing"),
        (["--server", "http://127.0.0.1:1", "--model", "t", "--concurrency", "0"], "concurrency is 0"),
        (["--server", "http://127.0.0.1:1", "--model", "t", "--timeout", "0"], "timeout is 0 s"),
        (["--server", "http://127.0.0.1:1", "--model", "t", "--batch", "8"], "--batch means nothing with --server"),
        (["--server", "http://127.0.0.1:1", "--model", "t", "--template-options", "["], "no JSON"),
        (["--target", "/t", "--model", "t"], "--model means nothing with --target"),
        (["--target", "/t", "--server", "http://127.0.0.1:1"], "one of --target and --server"),
        ([], "one of --target and --server"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: list[str], fault: str) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "a")
    done = call("regenerate", "--prompts", prompts, "--out", tmp_path / "out.jsonl", "--max-new", "4", *arguments)
    assert done.returncode == 2 and fault in done.stderr and "secret" not in done.stderr, done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_that_no_server_can_answer(server: ChatServer, tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    called = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "tool", "content": "1"},
    ]
    file.write_text('{"input_ids": [1]}\n' + json.dumps({"messages": called}) + '\n{"prompt": "good"}\n')
    with pytest.raises(DataError, match=r":1: token ids, and servers take text"):
        ask(server, file, out)
    outcome = ask(server, file, out, skip_bad=True)
    assert [r["line"] for r in rows(out)] == [2]
    assert [s.partition(": ")[2][:10] for s in outcome.plan.skipped] == ["token ids,", "tool calls"]


def test_an_output_of_another_origin_or_edited_is_refused(server: ChatServer, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", "a", "b"), tmp_path / "out.jsonl"
    ask(server, prompts, out)
    whole = out.read_bytes()
    with pytest.raises(ConfigError, match="temperature differ"):
        ask(server, prompts, out, temperature=1.0)
    more = tmp_path / "more.jsonl"
    ask(server, prompts, more, seed=3, template_options={"enable_thinking": False})
    with pytest.raises(ConfigError, match=r"\(chat_template_kwargs, seed differ\)"):
        ask(server, prompts, more)
    for line in (
        b"[" * 5000,
        whole.splitlines()[0],
        b'{"line": 7}',
        b"[]",
        b'{"line": 1, "messages": [{"role": "user", "content": "x"}]}',
    ):
        out.write_bytes(whole.splitlines()[0] + b"\n" + line + b"\n")
        with pytest.raises(DataError, match="no answer to a prompt, or a second one") as caught:
            ask(server, prompts, out)
        assert caught.value.where == f"{out}:2"
    assert ask(server, prompts, out, anew=True, temperature=1.0).made == 2


def test_it_stops_soon_when_it_is_interrupted(server: ChatServer, tmp_path: Path) -> None:
    for question in QUESTIONS[5:]:
        server.faults[question] = ["hang"]
    prompts, out = write_prompts(tmp_path / "p.jsonl", *QUESTIONS), tmp_path / "out.jsonl"
    process = start(
        "regenerate", "--server", server.url, "--model", "t", "--prompts", prompts, "--out", out, "--max-new", "4"
    )
    limit = time.monotonic() + LIMIT
    while (
        not (out.exists() and out.read_bytes().count(b"\n") == 5 and server.under_way == 32)
        and time.monotonic() < limit
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130 and "goes on from here" in err and "Traceback" not in err
    assert len(answers(out)) == 5


def certificate(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "cert.pem"
    pem = serialization.Encoding.PEM
    file.write_bytes(key.private_bytes(pem, *plain) + built.public_bytes(pem))
    return file


def test_tls_is_checked(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url, prompts = server.url.replace("http:", "https:"), write_prompts(tmp_path / "p.jsonl", "a", "b")
    with pytest.raises(ConfigError, match="certificate is refused: self-signed"):
        ask(url, prompts, tmp_path / "out.jsonl")
    assert not server.asked
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    server.faults["a"], server.faults["b"] = ["cut"], ["drip"]
    ask(url, prompts, tmp_path / "out.jsonl", timeout_s=3.0)
    assert answers(tmp_path / "out.jsonl") == {0: "re: a", 1: "re: b"}
