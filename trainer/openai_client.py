"""One request at a time to an OpenAI-compatible server: completions of chats and of plain text. Standard library only.

Every request ends: connecting and reading share one deadline, and a timer cuts the socket when it is over, also of a
server that drips. Faults that pass (429, 5xx, timeouts, a connection cut) are tried again with growing pauses, or after
what `Retry-After` asks for. Redirects are not followed and proxies not asked, so the key goes to one host only.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import ConfigError, TrainerError

#: Bytes of an answer at most.
LARGEST = 64 << 20
#: Statuses that may be another one the next time.
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Longer than this no `Retry-After` is waited for, in seconds.
LONGEST_ASKED_S = 300.0


class BadAnswer(Exception):
    """An answer that is no training data, or a request that this server will never answer. kind: one word."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Stopped(Exception):
    """The caller gave up."""


class _Passing(Exception):
    """A fault that may pass. after: seconds that the server asks to wait. reached: the server did answer."""

    def __init__(self, reason: str, *, after: float | None = None, reached: bool = False) -> None:
        super().__init__(reason)
        self.after, self.reached = after, reached


@dataclass(frozen=True)
class Answer:
    """text: the words. thoughts: what a reasoning parser took out of them. tokens: as the server counts them."""

    text: str
    thoughts: str | None
    tokens: int


@dataclass(frozen=True)
class Server:
    """Where and how to ask.

    Attributes:
        url: with or without /v1. key: None for a server that wants none; never shown.
        timeout_s: for one request as a whole. retries: after the first try.
    """

    url: str
    key: str | None = None
    timeout_s: float = 600.0
    retries: int = 6

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def check(self) -> None:
        """
        Raises:
            ConfigError: no http URL, or a key that no header can carry.
        """
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                "this is no URL of a server", f"--server {_bare(self.url)}", "for example http://host:8000/v1"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "the URL holds more than a host and a path",
                f"--server {_bare(self.url)}",
                "give the key by --api-key-env; leave queries out",
            )
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key):
            raise ConfigError("the key is empty or holds characters that no header can carry", "--api-key-env")
        if self.timeout_s <= 0 or self.retries < 0:
            raise ConfigError(f"timeout is {self.timeout_s:g} s, retries are {self.retries}", "--timeout, --retries")


def _bare(url: str) -> str:
    """The URL without user and password."""
    return url.rpartition("@")[2] if "@" in url else url


class Client:
    """A connection of one thread, kept open between requests.

    Args:
        server: checked. stop: once it is set, nothing is waited for any more.
    """

    def __init__(self, server: Server, stop: threading.Event) -> None:
        parts = urlsplit(server.url)
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._server, self._stop = server, stop
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._connection: http.client.HTTPConnection | None = None
        self._used = False

    def close(self) -> None:
        """Lets the connection go; a request under way in another thread ends with an error."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _cut(connection)
            connection.close()

    def chat(self, messages: list[dict[str, Any]], body: Mapping[str, Any]) -> Answer:
        """/v1/chat/completions.

        Raises:
            BadAnswer, Stopped, ConfigError (key, model, path), TrainerError (the server cannot be reached).
        """
        return _chat_answer(self._ask("/chat/completions", {**body, "messages": messages}))

    def complete(self, prompt: str, body: Mapping[str, Any]) -> Answer:
        """/v1/completions; raises as `chat` does."""
        return _text_answer(self._ask("/completions", {**body, "prompt": prompt}))

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        pause = FIRST_PAUSE_S
        for attempt in range(self._server.retries + 1):
            if self._stop.is_set():
                raise Stopped
            try:
                return self._once(path, data)
            except _Passing as fault:
                self.close()
                if attempt == self._server.retries:
                    tries = f"{attempt + 1} times: {fault}"
                    if fault.reached:
                        raise BadAnswer("server fault", f"asked {tries}") from None
                    raise TrainerError(
                        f"the server did not answer, asked {tries}",
                        self._where(path),
                        "look at the server; the same command goes on from here",
                    ) from None
                wait = pause * random.uniform(0.5, 1.0) if fault.after is None else fault.after
                pause = min(2 * pause, LONGEST_PAUSE_S)
                if self._stop.wait(wait):
                    raise Stopped from None
        raise AssertionError("unreachable")

    def _once(self, path: str, data: bytes) -> dict[str, Any]:
        """One request, within its deadline."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._server.key is not None:
            headers["Authorization"] = f"Bearer {self._server.key}"
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connect()
            self._used = False
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _cut(connection)

        timer = threading.Timer(self._server.timeout_s, expire)
        timer.daemon = True
        timer.start()
        reached = False
        try:
            if connection.sock is None:
                connection.connect()
                if expired.is_set() or self._stop.is_set():  # then nothing was there to be cut, and nobody cuts again
                    raise TimeoutError
            reached = True
            connection.request("POST", self._base + path, body=data, headers=headers)
            response = connection.getresponse()
            raw = response.read(LARGEST + 1)
            if response.length and len(raw) <= LARGEST:  # read(n) says nothing of an end that came too early
                raise http.client.IncompleteRead(raw, response.length)
            status, kind = response.status, response.headers.get_content_type()
            after = _retry_after(response.headers.get("Retry-After"))
            if expired.is_set():
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if self._stop.is_set():
                raise Stopped from None
            stale = self._used and isinstance(error, (http.client.RemoteDisconnected, ConnectionError))
            if stale and not expired.is_set():
                return self._once(path, data)  # the server had let an idle connection go: a new one, at once
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"the server's certificate is refused: {error.verify_message}", self._where(path)
                ) from None
            if expired.is_set() or isinstance(error, TimeoutError):
                raise _Passing(f"no whole answer within {self._server.timeout_s:g} s", reached=reached) from None
            fault = self._hide(str(error) or type(error).__name__)
            raise _Passing(f"the connection failed ({fault})", reached=reached) from None
        finally:
            timer.cancel()
        self._used = True
        if response.will_close:
            self.close()
        return self._judged(path, status, kind, raw, after)

    def _connect(self) -> http.client.HTTPConnection:
        wait = self._server.timeout_s
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=wait, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=wait)

    def _judged(self, path: str, status: int, kind: str, raw: bytes, after: float | None) -> dict[str, Any]:
        said = self._hide(_said(raw))
        where = self._where(path)
        if status in PASSING:
            raise _Passing(f"status {status}{said}", after=after, reached=True)
        if status in (401, 403):
            raise ConfigError(
                f"the server refuses the key: status {status}{said}"
                if self._server.key
                else f"the server wants a key{said}",
                where,
                "name the variable that holds the key in --api-key-env",
            )
        if status in (404, 405, 501):
            raise ConfigError(
                f"the server has no such path or model: status {status}{said}", where, "check --server, --model"
            )
        if 300 <= status < 400:
            raise ConfigError(f"the server sends elsewhere (status {status})", where, "give the final URL in --server")
        if status != 200:
            raise BadAnswer("refused", f"status {status}{said}")
        if len(raw) > LARGEST:
            raise BadAnswer("too large", f"the answer has more than {LARGEST >> 20} MiB")
        if kind != "application/json":
            raise BadAnswer("no JSON", f"the answer is {kind}, not application/json")
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            raise BadAnswer("no JSON", f"the answer of {len(raw)} bytes is no JSON") from None
        if not isinstance(answer, dict):
            raise BadAnswer("no JSON", "the answer is no JSON object")
        return answer

    def _where(self, path: str) -> str:
        return f"{self._server.url.rstrip('/')} ({self._base}{path})"

    def _hide(self, text: str) -> str:
        return text.replace(self._server.key, "(key)") if self._server.key else text


def _cut(connection: http.client.HTTPConnection) -> None:
    """Wakes whoever reads from it."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS too the plain socket: no good-bye to wait for


def _said(raw: bytes) -> str:
    """What an error's body says, in a few words."""
    try:
        value = json.loads(raw)
        error = value.get("error", value)
        text = error.get("message", "") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = ""
    text = " ".join(str(text).split())[:300]
    return f": {text}" if text else ""


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date; None if there is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(0.0, seconds), LONGEST_ASKED_S) if seconds == seconds else None


def _choice(answer: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    try:
        choice = answer["choices"][0]
        finish = choice["finish_reason"]
    except (KeyError, IndexError, TypeError):
        raise BadAnswer("malformed", "the answer has no choices[0] with a finish_reason") from None
    if finish == "length":
        raise BadAnswer("cut", "the answer was cut at --max-new (or at the model's length)")
    if finish != "stop":
        raise BadAnswer("unfinished", f"the answer ended with {finish!r}, not with stop")
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return choice, tokens if isinstance(tokens, int) else 0


def _chat_answer(answer: Mapping[str, Any]) -> Answer:
    choice, tokens = _choice(answer)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadAnswer("malformed", "the answer has no message")
    if message.get("tool_calls"):
        raise BadAnswer("tool call", "the answer calls a tool")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if thoughts is not None and not isinstance(thoughts, str):
        raise BadAnswer("malformed", "the answer's reasoning is no text")
    return Answer(_words(message.get("content")), thoughts, tokens)


def _text_answer(answer: Mapping[str, Any]) -> Answer:
    choice, tokens = _choice(answer)
    return Answer(_words(choice.get("text")), None, tokens)


def _words(text: Any) -> str:
    if text is not None and not isinstance(text, str):
        raise BadAnswer("malformed", "the answer's content is no text")
    if not text or not text.strip():
        raise BadAnswer("empty", "the answer is empty")
    return text
