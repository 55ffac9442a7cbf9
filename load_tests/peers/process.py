"""A contestant's process, seen from the benchmark: asked by lines, and frozen while others have their turn."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

LOG_TAIL = 1500


class ContestantError(Exception):
    """A contestant could not do what it was asked; the text says what and shows the end of its log."""


@contextmanager
def unwinding() -> Iterator[None]:
    """Signals that would end the benchmark at once, also a closing terminal's, end it as an error would, so that no
    contestant is left behind, stopped for ever. A closing terminal's shell and the kernel each send a signal: the next
    one must not end the cleaning up."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}  # nohup means it
    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Contestant:
    """One process group. Not thread-safe; ask one thing at a time."""

    def __init__(self, name: str, command: list[str], *, environment: dict[str, str], log: Path) -> None:
        self.name, self.versions = name, dict[str, str]()
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
                cwd=log.parent,
            )
        self._lines: queue.Queue[str] = queue.Queue(maxsize=4)
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, timeout: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            ContestantError: it failed, died or took longer than `timeout` seconds.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise ContestantError(f"{self.name}: no answer in {timeout:g} s\n{self._tail()}") from None
        except OSError:
            line = ""
        if not line:
            raise ContestantError(f"{self.name}: its process ended\n{self._tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ContestantError(f"{self.name}: {reply['error']}\n{self._tail()}")
        return dict(reply)

    def make(self, timeout: float, **settings: Any) -> None:
        self.versions = self.ask(timeout, do="make", settings=settings)["versions"]

    def answer(self, prompts: list[list[int]], output_len: int, timeout: float) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens.

        Raises:
            ContestantError: it did not give what was wanted.
        """
        reply = self.ask(timeout, do="answer", prompts=prompts, output_len=output_len)
        if [len(answer) for answer in reply["answers"]] != [output_len] * len(prompts):
            raise ContestantError(f"{self.name}: an answer has not the wanted number of tokens")
        return float(reply["seconds"]), reply["answers"]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Its turn: outside of this its processes are stopped, so that spinning threads take no time of the others."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._signal(signal.SIGKILL)  # what it started and left behind
        self._reader.join(timeout=10.0)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:] if self._log.exists() else ""
