"""A small real OpenAI-compatible server on loopback, which answers as it is told to: rightly, or with a fault."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = "application/json"


class ChatServer(ThreadingHTTPServer):
    """Answers the question q with `re: q`. Use it as a context.

    Attributes:
        faults: question -> what happens to it, one for each time that it is asked; then it is answered.
        key: what it wants as a bearer token. delay_s: before each answer.
        asked: question -> how often. bodies: of all requests. most: requests that were under way at one time.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.key: str | None = None
        self.delay_s = 0.0
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most = self.connections = 0
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no fault of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        with server.lock:
            server.asked[question] += 1
            server.bodies.append({**body, "path": self.path})
            server.under_way += 1
            server.most = max(server.most, server.under_way)
            fault = server.faults[question].pop(0) if server.faults[question] else ""
        try:
            server.over.wait(server.delay_s)
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                self.send(401, json.dumps({"error": {"message": f"no such key: {self.headers['Authorization']}"}}))
            elif fault:
                self.fail(fault, question)
            else:
                self.answer(question, f"re: {question}")
        finally:
            with server.lock:
                server.under_way -= 1

    def send(self, status: int, text: str, kind: str = JSON, **headers: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def text(self, content: Any, finish: Any = "stop", **message: Any) -> str:
        if self.path.endswith("/chat/completions"):
            choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
        else:
            choice = {"text": content, "finish_reason": finish}
        return json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}})

    def answer(self, question: str, content: Any, finish: Any = "stop", **message: Any) -> None:
        self.send(200, self.text(content, finish, **message))

    def fail(self, fault: str, question: str) -> None:
        whole = self.text(f"re: {question}")
        if fault.isdigit():
            self.send(int(fault), json.dumps({"error": {"message": "so it is"}}))
        elif fault.startswith("wait "):
            self.send(429, "", Retry_After=fault[5:])
        elif fault == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "half":
            self.send_response(200)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole[: len(whole) // 2].encode())
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "hang":
            self.server.over.wait(60)
            self.close_connection = True
        elif fault == "drip":
            self.send_response(200)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            for byte in whole.encode():
                if self.server.over.is_set():
                    break
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.05)
        elif fault == "goodbye":  # a good answer, and then the connection is let go without a word
            self.send(200, whole)
            self.close_connection = True
        elif fault == "html":
            self.send(200, "<p>welcome</p>", "text/html")
        elif fault == "torn":
            self.send(200, whole[:-9])
        elif fault == "list":
            self.send(200, "[1]")
        elif fault == "no choices":
            self.send(200, '{"choices": []}')
        elif fault == "no text":
            self.answer(question, 5)
        elif fault == "empty":
            self.answer(question, " \n")
        elif fault == "null":
            self.answer(question, None)
        elif fault == "tool":
            self.answer(question, None, tool_calls=[{"function": {"name": "f"}}])
        elif fault == "thinks":
            self.answer(question, "so", reasoning_content="hm")
        else:
            self.answer(question, "re", finish=None if fault == "none" else fault)
