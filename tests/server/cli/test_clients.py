"""`chat`, `complete` and `collect-env` as a user runs them, against a small fake server."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from troupellm.server.cli.main import main


class FakeServer(ThreadingHTTPServer):
    """Answers every message with its own words, one per chunk."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = "good"
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, body, self.headers["authorization"]))
        if self.server.behaviour == "refuse":
            self._reply(401, json.dumps({"error": {"message": "wrong\nkey"}}))
            return
        chat = "messages" in body
        words = (body["messages"][-1]["content"] if chat else body["prompt"]).split()
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat else []
        for word in words:
            piece = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            chunks.append({"choices": [{**piece, "finish_reason": None}]})
        if self.server.behaviour == "error":
            chunks.append({"error": {"message": "the worker died"}})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(words)}})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._reply(200, text + ("" if self.server.behaviour == "cut" else "data: [DONE]\n\n"))

    def _reply(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


def test_quick_chat_with_all_flags(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        [
            "chat",
            "--url",
            server.url,
            "-q",
            "good day",
            "--system-prompt",
            "be kind",
            "--max-tokens",
            "9",
            "--temperature",
            "0",
            "--api-key",
            "k",
            "--model-name",
            "mine",
            "--stats",
        ]
    )
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("good day \n[TTFT ")
    assert " 2 tokens, " in out
    path, body, key = server.requests[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert [message["content"] for message in body["messages"]] == ["be kind", "good day"]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("mine", 9, 0.0)


def test_the_chat_command_sends_the_conversation_so_far(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "one \ntwo \n"
    messages = server.requests[1][1]["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "one"),
        ("assistant", "one "),
        ("user", "two"),
    ]
    assert server.requests[0][1]["model"] == "fake"


def test_the_complete_command_streams_a_completion(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_API_KEY", "from-environment")
    assert main(["complete", "--url", server.url, "--quick", "once upon", "--max_tokens", "4"]) == 0
    assert capsys.readouterr().out == "once upon \n"
    path, body, key = server.requests[0]
    assert (path, key) == ("/v1/completions", "Bearer from-environment")
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ("once upon", 4, True)


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize(
    ("behaviour", "line"),
    [
        ("refuse", "troupellm: 401: wrong key\n"),
        ("error", "troupellm: the worker died\n"),
        ("cut", "troupellm: {url}: the answer ended early\n"),
    ],
)
def test_failures_are_one_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str], command: str, behaviour: str, line: str
) -> None:
    server.behaviour = behaviour
    assert main([command, "--url", server.url, "-q", "x"]) == 1
    assert capsys.readouterr().err == line.format(url=server.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "nonsense"])
def test_no_server_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "-q", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("troupellm: cannot reach ")
    assert error.count("\n") == 1


def test_a_reader_that_has_enough_is_no_crash(server: FakeServer) -> None:
    """As in `troupellm complete ... | head -c 1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "troupellm.server.cli.main", "complete", "--url", server.url, "-q", "a b"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-q", "\udcff"], "the message is no UTF-8 text"),
        (["-q", "x", "--api-key", "a\nb"], "the API key (--api-key, TROUPE_API_KEY or OPENAI_API_KEY) is no text"),
        (["-q", "x", "--api-key", "\udcff"], "the API key (--api-key, TROUPE_API_KEY or OPENAI_API_KEY) is no text"),
    ],
)
def test_a_message_that_cannot_be_sent_is_named(
    server: FakeServer, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(["chat", "--url", server.url, *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"troupellm: {line}")
    assert server.requests == []


def test_a_key_of_any_letters_is_sent_as_the_server_reads_it(server: FakeServer) -> None:
    assert main(["complete", "--url", server.url, "-q", "x", "--api-key", "schl\xfcssel"]) == 0
    assert server.requests[0][2] is not None
    assert server.requests[0][2].encode("latin-1") == "Bearer schl\xfcssel".encode()


def test_input_in_another_encoding_is_named(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"gr\xfc\xdfe\n"), encoding="utf-8"))
    assert main(["chat", "--url", server.url]) == 1
    assert capsys.readouterr().err == "troupellm: the message is no UTF-8 text\n"


def test_collect_env_tells_versions_and_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    for part in ("troupellm: ", "torch:", "cpu capability: ", "cores: ", "OMP_NUM_THREADS: 1"):
        assert part in out
    assert "very-secret" not in out


def test_client_commands_are_light_to_import() -> None:
    """The modules that `troupellm bench --help` and the client commands load before they run."""
    code = (
        "import sys\n"
        "import troupellm.load_tests.cli, troupellm.server.cli.chat, troupellm.server.cli.complete\n"
        "import troupellm.server.cli.collect_env\n"
        "heavy = {'torch', 'httpx', 'matplotlib', 'numpy', 'transformers', 'anyio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
