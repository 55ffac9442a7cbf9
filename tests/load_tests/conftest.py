"""A fake OpenAI server on loopback whose streams can be made to misbehave."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class FakeServer(ThreadingHTTPServer):
    """`behaviour` is one of: good, refuse, error_event, no_done, too_few, cut, no_usage."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = "good"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "fake-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.server.behaviour == "refuse":
            self._json(429, {"error": {"message": "the waiting queue is full"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in self._events(body):
            data = event.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if self.server.behaviour == "cut":
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        behaviour, wanted = self.server.behaviour, body["max_tokens"]
        chat = "messages" in body
        count = wanted - 1 if behaviour == "too_few" else wanted
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for index in range(count):
            if index == 1:
                yield ": keep-alive\n\n"
            last = index == count - 1
            piece = {"delta": {"content": "a "}} if chat else {"text": "a "}
            yield _event({"choices": [{**piece, "finish_reason": "length" if last else None}], "usage": None})
            if behaviour == "cut" and index == 1:
                return
            if behaviour == "error_event" and index == 1:
                yield _event({"error": {"message": "the worker died", "code": "engine_restarting"}})
                break
        if behaviour not in ("no_usage", "error_event"):
            usage = {"prompt_tokens": 7, "completion_tokens": count}
            yield _event({"choices": [], "usage": usage})
        if behaviour != "no_done":
            yield "data: [DONE]\n\n"

    def _json(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _event(content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
