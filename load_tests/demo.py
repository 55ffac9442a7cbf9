"""`make demo`: a server on a free port, one chat answer and one completion streamed through the real `openai` SDK."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START_SECONDS = 120.0


@contextmanager
def server() -> Iterator[str]:
    """Run `troupellm serve` with the built-in model; gives its base address, stops it with SIGTERM at the end."""
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", "--port", "0", "--disable-access-log"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"at (http://\S+)", line):
                yield found.group(1)
                break
        else:
            raise SystemExit(f"the server did not start (exit code {process.wait()})")
    finally:
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=START_SECONDS) != 0:
            raise SystemExit(f"the server ended with exit code {process.returncode}")


def show(title: str, started: float, pieces: Iterator[str], count: Any) -> None:
    """Print the pieces as they come, then the time to the first one and the tokens per second of the rest."""
    print(f"\n{title}")
    first = None
    for piece in pieces:
        if piece and first is None:
            first = time.perf_counter()
        print(piece, end="", flush=True)
    end = time.perf_counter()
    if first is None:
        raise SystemExit("the answer was empty")
    tokens = count()
    rate = (tokens - 1) / (end - first) if tokens > 1 else 0.0
    print(f"\n[TTFT {(first - started) * 1000:.0f} ms, {tokens} tokens, {rate:.0f} tokens/s]")


def main() -> int:
    from openai import OpenAI

    with server() as address, OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        usage: dict[str, int] = {}

        def chat(question: str) -> Iterator[str]:
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=200,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                if chunk.usage:
                    usage["tokens"] = chunk.usage.completion_tokens
                if chunk.choices:
                    yield chunk.choices[0].delta.content or ""

        def complete(prompt: str) -> Iterator[str]:
            stream = client.completions.create(
                model=model,
                prompt=prompt,
                temperature=0,
                max_tokens=80,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                if chunk.usage:
                    usage["tokens"] = chunk.usage.completion_tokens
                if chunk.choices:
                    yield chunk.choices[0].text

        question, prompt = "Tell me a story about a fox.", "Once upon a time"
        show(f"chat: {question}", time.perf_counter(), chat(question), lambda: usage["tokens"])
        show(f"completion: {prompt} ...", time.perf_counter(), complete(prompt), lambda: usage["tokens"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
