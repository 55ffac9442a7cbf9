"""Processes in which chat templates are rendered: see `template_child` for the other side."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from troupellm.models import template_child
from troupellm.protocol.errors import EngineStopped

START_SECONDS = 30.0
"""Until a new process answers, on a busy machine."""
GRACE_SECONDS = 0.1
"""Of processor time beyond its limit, in which a rendering that heeds signals ends by itself."""
IMPORT_SECONDS = 1.0
"""Of processor time that a new process may take before its first rendering."""
PATIENCE = 20
"""Times a rendering's limit, on any clock: a busy machine gives a process little processor time."""
MOST_IDLE = 2
"""Processes that wait for the next rendering."""
_LOOK_MILLISECONDS = 50
_READ_BYTES = 2**20


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
            fields = {"source": source, "variables": variables, "seconds": seconds}
            job = json.dumps(fields, default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(f"it gets plain data only: {error}") from None
        child = self._take()
        healthy = False
        try:
            answer = child.ask(job, seconds)
            healthy = answer.get("exhausted") != "memory"
        finally:
            self._put_back(child, healthy=healthy)
        if "exhausted" in answer:
            raise TemplateExhausted(answer["exhausted"])
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return answer["text"]

    def close(self) -> None:
        """End all processes. A rendering that runs raises TemplateExhausted, a later one EngineStopped."""
        with self._lock:
            self._closed = True
            children, self._all = list(self._all), set()
            self._idle.clear()
        for child in children:
            child.end()

    def _take(self) -> "_Child":
        with self._lock:
            if self._closed:
                raise EngineStopped("the engine was closed")
            if self._idle:
                return self._idle.pop()
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
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            start_new_session=True,  # signals of a terminal are for its parent
        )
        self.pid = self._process.pid
        self._allowed = IMPORT_SECONDS

    def ask(self, job: bytes, seconds: float) -> dict[str, str]:
        """Hand over one job and wait for its answer.

        Raises:
            TemplateExhausted: its time is over though no signal ended it, or the process died of the job.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        descriptor, answer = self._process.stdout.fileno(), bytearray()
        most, until = (
            self._cpu_seconds() + seconds + GRACE_SECONDS,
            time.monotonic() + START_SECONDS + PATIENCE * seconds,
        )
        self._allowed = 0.0
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        try:
            rest = memoryview(job)
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            while not answer.endswith(b"\n"):
                if poll.poll(_LOOK_MILLISECONDS):
                    piece = os.read(descriptor, _READ_BYTES)
                    if not piece:
                        raise TemplateExhausted("memory")  # an overflow of the stack ends a process too
                    answer += piece
                elif self._cpu_seconds() > most or time.monotonic() > until:
                    raise TemplateExhausted("time")
        except OSError:
            raise TemplateExhausted("memory") from None
        decoded: dict[str, str] = json.loads(answer)
        return decoded

    def _cpu_seconds(self) -> float:
        """Processor time of the process; 0 where the system does not say."""
        if sys.platform == "linux":
            with suppress(OSError):
                return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
        return 0.0

    def end(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"not {type(value).__name__}")
