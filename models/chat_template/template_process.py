"""Processes in which chat templates are rendered: see `template_child` for the other side."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from troupellm.models.chat_template import template_child
from troupellm.models.processes.module_path import child_environment
from troupellm.protocol.errors import EngineStopped

START_SECONDS = 30.0
"""Longest start of a new process, on a busy machine."""
GRACE_SECONDS = 0.1
"""Processor time beyond its limit, in which a rendering that heeds signals ends by itself."""
IMPORT_SECONDS = 1.0
"""Processor time that a new process may take before its first rendering."""
PATIENCE = 20
"""Times a rendering's limit, on any clock: a busy machine gives a process little processor time."""
MOST_IDLE = 6
"""Processes that wait for the next rendering: one for each thread that renders, since a start costs 0.1 s."""
SECONDS_PER_BYTE = 5e-8
"""Processor time to read a job."""
_LOOK_MILLISECONDS = 50
_READ_BYTES = 2**20
_ENCODED_LETTERS = 2**18
_TEXT_DEPTH = 8
"""Long texts stand at most so deep in messages: in parts of contents, arguments of calls, results of tools."""
_DECODED_BYTES = 2**22
"""Most bytes decoded in one call, which holds the interpreter's lock."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=lambda value: _plain(value))


class TemplateExhausted(Exception):
    """A rendering took more processor time or memory than it may; the text says which."""


class TemplateRefused(Exception):
    """The template refuses the conversation or does something wrong; the text says why."""


class Renderer(Protocol):
    """Runs templates. Any thread may call it."""

    def render(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        """The text that a template makes of variables, which are plain data.

        Args:
            seconds: of processor time.

        Raises:
            TemplateExhausted, TemplateRefused: there is no text.
        """


class RendersHere:
    """Renders in the calling thread, without limits: for templates that are trusted, and for tests."""

    def render(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        try:
            return template_child.render(source, variables)
        except Exception as error:  # template code raises anything
            reason = str(error)[: template_child.LONGEST_REASON] or type(error).__name__
            raise TemplateRefused(reason) from error


class TemplateProcesses:
    """As many processes as threads render at once, started when they are needed. The caller closes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._all]

    def render(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        """See `Renderer`. Also raises TemplateRefused for variables that are no plain data."""
        try:
            job = _job(source, variables, seconds)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(f"it gets plain data only: {error}") from None
        child = self._take()
        healthy = False
        try:
            answer, text = child.ask(job, seconds)
            healthy = answer.get("exhausted") != "memory"
        except TemplateExhausted:
            if self._closed:
                raise EngineStopped("the engine was closed") from None
            raise
        finally:
            self._put_back(child, healthy=healthy)
        if "exhausted" in answer:
            raise TemplateExhausted(answer["exhausted"])
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return text

    def close(self) -> None:
        """End all processes. Renderings that run, and later ones, raise EngineStopped."""
        with self._lock:
            self._closed = True
            idle, busy = self._idle, self._all.difference(self._idle)
            self._idle, self._all = [], set()
        for child in busy:
            child.kill()  # its thread still reads the pipes, and closes them
        for child in idle:
            child.end()

    def _take(self) -> "_Child":
        with self._lock:
            if self._closed:
                raise EngineStopped("the engine was closed")
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                self._all.discard(child)
                child.end()
        try:
            child = _Child()
        except OSError:
            raise EngineStopped("there is no process for the chat template now", code="engine_restarting") from None
        with self._lock:
            self._all.add(child)
        return child

    def _put_back(self, child: "_Child", *, healthy: bool) -> None:
        with self._lock:
            if healthy and not self._closed and len(self._idle) < MOST_IDLE:
                self._idle.append(child)
                return
            self._all.discard(child)
        child.end()


class _Child:
    """One process. It ends with its input, so it outlives its parent by one rendering at most."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(template_child.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=child_environment(),
            start_new_session=True,  # signals of a terminal are for its parent
        )
        self.pid = self._process.pid
        self._allowed = IMPORT_SECONDS

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: bytes, seconds: float) -> tuple[dict[str, str], str]:
        """Hand over one job and wait for its answer, and the text where there is one.

        Raises:
            TemplateExhausted: its time is over though no signal ended it, or the process died of the job.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        most = self._cpu_seconds() + self._allowed + seconds + GRACE_SECONDS + SECONDS_PER_BYTE * len(job)
        until = time.monotonic() + START_SECONDS + PATIENCE * seconds
        self._allowed = 0.0
        try:
            rest = memoryview(job)
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            return self._answer(self._process.stdout.fileno(), most, until)
        except OSError:
            raise TemplateExhausted("memory") from None

    def _answer(self, descriptor: int, most: float, until: float) -> tuple[dict[str, str], str]:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        received, begin, end = bytearray(), 0, math.inf
        while len(received) < end:
            if poll.poll(_LOOK_MILLISECONDS):
                piece = os.read(descriptor, _READ_BYTES)
                if not piece:  # an overflow of the stack ends a process too
                    raise TemplateExhausted("time" if self._process.wait() == -signal.SIGXCPU else "memory")
                received += piece
                if not begin and b"\n" in piece:
                    begin = received.index(b"\n") + 1
                    answer = json.loads(received[:begin])
                    end = begin + answer["num_bytes"]
            elif self._cpu_seconds() > most or time.monotonic() > until:
                raise TemplateExhausted("time")
        return answer, _text(received, begin)

    def _cpu_seconds(self) -> float:
        """Processor time of the process; 0 where the system does not say."""
        if sys.platform == "linux":
            with suppress(OSError):
                return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
        return 0.0

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill it and wait until it is gone. Idempotent. No thread may be reading from it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _job(source: str, variables: Mapping[str, Any], seconds: float) -> bytes:
    """A line of JSON."""
    others = {name: value for name, value in variables.items() if name != "messages"}
    fields = _ENCODER.encode({"source": source, "seconds": seconds, "variables": others})
    messages = "".join(_json(list(variables["messages"])))
    return f'{fields[:-1]}, "messages": {messages}}}\n'.encode("utf-8", "surrogatepass")


def _json(value: Any, depth: int = _TEXT_DEPTH) -> Iterator[str]:
    """JSON in pieces: a call of the encoder holds the interpreter's lock, for 50 ms with a string of 8 MiB."""
    if isinstance(value, str) and len(value) > _ENCODED_LETTERS:
        yield '"'
        for at in range(0, len(value), _ENCODED_LETTERS):
            yield _ENCODER.encode(value[at : at + _ENCODED_LETTERS])[1:-1]
        yield '"'
    elif isinstance(value, Mapping) and depth:
        yield "{"
        for number, (key, held) in enumerate(value.items()):
            name = f"{_ENCODER.encode(key)}: " if isinstance(key, str) else _ENCODER.encode({key: 0})[1:-2]
            yield f", {name}" if number else name
            yield from _json(held, depth - 1)
        yield "}"
    elif isinstance(value, list | tuple) and depth:
        yield "["
        for number, held in enumerate(value):
            if number:
                yield ", "
            yield from _json(held, depth - 1)
        yield "]"
    else:
        yield _ENCODER.encode(value)


def _text(data: bytearray, begin: int) -> str:
    """The UTF-8 that begins there, decoded piece by piece, whose ends are ends of characters."""
    pieces = []
    while begin < len(data):
        end = min(begin + _DECODED_BYTES, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(data[begin:end].decode("utf-8", "surrogatepass"))
        begin = end
    return "".join(pieces)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"not {type(value).__name__}")
