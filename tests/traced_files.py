"""Counts the files of the product that one streamed chat and one decode step pass, and lists them in their order.

    python tests/traced_files.py

The built-in model is served on a loopback socket of this process, with the model worker on a thread. Every call of a
Python function on any thread is recorded. The first chats are not counted: they load and compile. A file counts when
most of the counted chats (or decode steps) pass it, so that timers that happen to run meanwhile do not.
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import anyio

import troupellm
from troupellm.actors.engine.engine import Engine
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.access.host_and_origin import guard_of
from troupellm.server.access.keys import read_keys
from troupellm.server.app.app import App, admin_access
from troupellm.server.host.server_state import ServerState
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer

ROOT = Path(troupellm.__file__).resolve().parent
TOPS = ("protocol", "kernels", "models", "actors", "server")
WARM_CHATS, COUNTED_CHATS = 3, 5
TOKENS = 24
EDGE_STEPS = 6
"""Steps at the start and at the end of a chat that are no plain decode steps."""
STEP = SchedulerCore.update.__code__
"""Runs once for each step's result: between two calls lies one decode step."""


class Recorder:
    """The calls of the product's functions, in their order. Installed before any other thread begins."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self.recording = False
        self._files: dict[str, str | None] = {}
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if self.recording and event == "call":
            self.calls.append(frame.f_code)

    def file_of(self, code: CodeType) -> str | None:
        """A file of the product, from its root; None for any other file."""
        name = code.co_filename
        if name not in self._files:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in TOPS
            self._files[name] = path.relative_to(ROOT).as_posix() if inside else None
        return self._files[name]

    def files_of(self, calls: Iterable[CodeType]) -> dict[str, set[str]]:
        """The functions that were called, by file."""
        files: dict[str, set[str]] = {}
        for code in calls:
            if (file := self.file_of(code)) is not None:
                files.setdefault(file, set()).add(code.co_qualname)
        return files


def steps_of(calls: list[CodeType]) -> list[list[CodeType]]:
    """The calls of each plain decode step."""
    marks = [index for index, code in enumerate(calls) if code is STEP][EDGE_STEPS:-EDGE_STEPS]
    return [calls[begin:end] for begin, end in pairwise(marks)]


def passed_by_most(runs: list[dict[str, set[str]]]) -> dict[str, set[str]]:
    counts = Counter(file for run in runs for file in run)
    most = [file for file, count in counts.items() if 2 * count > len(runs)]
    return {file: set().union(*(run.get(file, set()) for run in runs)) for file in most}


async def chat(port: int, text: str) -> None:
    """One streamed chat, read to its end."""
    asked = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": TOKENS}
    body = json.dumps(asked | {"ignore_eos": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(head.encode() + body)
        seen = b""
        while b"data: [DONE]" not in seen:
            seen += await stream.receive()
    assert b" 200 " in seen.split(b"\r\n", 1)[0], seen


async def record(recorder: Recorder) -> list[list[CodeType]]:
    """The calls of each counted chat."""
    config = ServerConfig(port=0)
    runs: list[list[CodeType]] = []
    async with Engine(worker_process=False, device="cpu", num_threads=1, flush_interval=0.0) as engine:
        host = ServerState(config, engine)
        app = App(host, keys=read_keys(config).callers, guard=guard_of(config), **admin_access(config))
        listener, _ = bind(config)
        front = HypercornServer(app, config, listener)
        async with anyio.create_task_group() as group, host.running():
            group.start_soon(front.run)
            for number in range(WARM_CHATS + COUNTED_CHATS):
                recorder.recording = number >= WARM_CHATS
                await chat(listener.getsockname()[1], f"Tell me story number {number}.")
                await anyio.sleep(0.05)  # the end of the request in the engine belongs to it
                recorder.recording = False
                if recorder.calls:
                    runs.append(recorder.calls)
                    recorder.calls = []
            with anyio.CancelScope(shield=True):
                await front.stop()
    return runs


def show(title: str, files: dict[str, set[str]]) -> None:
    print(f"{title}: {len(files)} files, {sum(map(len, files.values()))} functions")
    for file, functions in files.items():
        print(f"  {file:52}{len(functions):4}")


def main() -> None:
    recorder = Recorder()
    runs = anyio.run(record, recorder)
    chats = passed_by_most([recorder.files_of(calls) for calls in runs])
    steps = passed_by_most([recorder.files_of(step) for calls in runs for step in steps_of(calls)])
    show("one streamed chat", chats)
    show("one decode step", steps)


if __name__ == "__main__":
    main()
