"""The shared part of `chat` and `complete`: the connection to a running server, its streams, and errors of one line."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from troupellm.server.base.exit_codes import EXIT_FAILED

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 5.0
JSON = {"content-type": "application/json"}
NO_TEXT = "the message is no UTF-8 text"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Reached without the proxies of the environment."""


class ClientError(Exception):
    """The server cannot be reached or refused; the text is one line for the user."""


class Stats:
    """Times of one answer, taken at the client."""

    def __init__(self) -> None:
        self._sent = time.perf_counter()
        self._first: float | None = None
        self._last = self._sent
        self.tokens = 0

    def piece(self) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last

    def __str__(self) -> str:
        if self._first is None:
            return "no tokens"
        rate = (self.tokens - 1) / (self._last - self._first) if self._last > self._first and self.tokens > 1 else 0.0
        return f"TTFT {(self._first - self._sent) * 1000:.0f} ms, {self.tokens} tokens, {rate:.1f} tokens/s"


class Server:
    """A running server of the OpenAI API."""

    def __init__(self, http: "httpx.Client", url: str, model: str | None) -> None:
        self._http = http
        self._url = url
        self.model = model or self._first_model()

    def stream(self, path: str, body: dict[str, Any], stats: Stats) -> Iterator[dict[str, Any]]:
        """The first choice of every chunk of a streamed answer.

        Raises:
            ClientError: refused, failed on the way, or the stream ended early.
        """
        import httpx

        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            content = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # what a terminal or a pipe gave in another encoding
            raise ClientError(NO_TEXT) from None
        done = False
        try:
            with self._http.stream("POST", path, content=content, headers=JSON) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise ClientError(_refusal(reply))
                for line in reply.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    payload = line[5:].strip()
                    if payload == "[DONE]":
                        done = True
                        break
                    chunk = json.loads(payload)
                    if chunk.get("error"):
                        raise ClientError(_message(chunk["error"]))
                    if chunk.get("usage"):
                        stats.tokens = chunk["usage"]["completion_tokens"]
                    yield from chunk.get("choices", [])[:1]
        except httpx.HTTPError as error:
            raise ClientError(f"{self._url}: {_reason(error)}") from None
        except (ValueError, LookupError, TypeError):
            raise ClientError(f"{self._url} sent something that is not a chunk of the OpenAI API") from None
        if not done:
            raise ClientError(f"{self._url}: the answer ended early")

    def _first_model(self) -> str:
        import httpx

        try:
            reply = self._http.get("/models")
            if reply.status_code != 200:
                raise ClientError(_refusal(reply))
            return str(reply.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise ClientError(f"cannot reach {self._url}: {_reason(error)}") from None
        except (ValueError, LookupError, TypeError):
            raise ClientError(f"{self._url} is not an OpenAI API; give --url as http://127.0.0.1:8000/v1") from None


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base of the API (default: %(default)s)")
    parser.add_argument("--model-name", help="default: the first model that the server lists")
    parser.add_argument("--api-key", help="default: TROUPE_API_KEY or OPENAI_API_KEY from the environment")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, leave")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens (default: the server's)")
    parser.add_argument("--temperature", type=float, help="default: the model's own")
    parser.add_argument("--stats", action="store_true", help="print time to first token and tokens/s")


def common_fields(args: argparse.Namespace) -> dict[str, Any]:
    fields = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in fields.items() if value is not None}


def converse(args: argparse.Namespace, answer: Callable[[Server, str], None]) -> int:
    """Answer the quick message, or each line of the input until its end. Returns the exit code.

    At a terminal a failed answer is reported and the conversation goes on; elsewhere it ends with code 1.
    """
    try:
        with connected(args) as server:
            if args.quick is not None:
                answer(server, args.quick)
                return 0
            terminal = sys.stdin.isatty()
            if terminal:
                print(f"{server.model} at {args.url}; end with Ctrl-D", file=sys.stderr)
            while (line := _read_line(terminal)) is not None:
                if not line.strip():
                    continue
                try:
                    answer(server, line)
                except ClientError as error:
                    if not terminal:
                        raise
                    print(f"troupellm: {error}", file=sys.stderr)
            return 0
    except ClientError as error:
        print(f"troupellm: {error}", file=sys.stderr)
        return EXIT_FAILED


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[Server]:
    """Raises ClientError."""
    import httpx

    key = args.api_key or os.environ.get("TROUPE_API_KEY", "").split(",")[0] or os.environ.get("OPENAI_API_KEY")
    if key and not key.isprintable():
        raise ClientError("the API key (--api-key, TROUPE_API_KEY or OPENAI_API_KEY) is no text that can be sent")
    headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    try:
        local = httpx.URL(args.url).host in LOOPBACK
        http = httpx.Client(base_url=args.url, headers=headers, timeout=timeout, trust_env=not local)
    except (httpx.InvalidURL, ValueError) as error:
        raise ClientError(f"--url {args.url}: {error}") from None
    with http:
        yield Server(http, args.url, args.model_name)


def _read_line(terminal: bool) -> str | None:
    try:
        return input("> " if terminal else "")
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise ClientError(NO_TEXT) from None


def _refusal(reply: "httpx.Response") -> str:
    try:
        return f"{reply.status_code}: {_message(reply.json()['error'])}"
    except (ValueError, LookupError, TypeError):
        return f"{reply.status_code} {reply.reason_phrase} from {reply.url}"


def _message(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or "the server reported an error without a message").split())


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
