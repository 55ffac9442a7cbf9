"""Runs torch's profiler around the steps of a worker, with a limit: the record of one step takes megabytes."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.sleep import StartProfile, WorkerReport

SUFFIX = ".pt.trace.json"


class StepProfile:
    """All calls come from the thread of the steps."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._command: StartProfile | None = None
        self._steps = 0

    def start(self, command: StartProfile) -> WorkerReport:
        """
        Raises:
            InvalidRequest: the folder cannot be written to, or one is being recorded already.
        """
        if self._command is not None:
            raise InvalidRequest("a profile is being recorded already", code="profile_running")
        try:
            Path(command.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"the profile's folder cannot be made: {error.strerror}") from None
        wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._running = profile(activities=wanted, acc_events=True)
        self._running.start()
        self._command, self._steps = command, 0
        return WorkerReport()

    def stepped(self) -> None:
        """A step is over."""
        if self._running is None or self._command is None:
            return
        self._steps += 1
        if self._steps == self._command.max_steps:
            self._running.stop()
            self._write()

    def stop(self) -> WorkerReport:
        """
        Raises:
            InvalidRequest: none is being recorded, or it cannot be written.
        """
        command, steps = self._command, self._steps
        if command is None:
            raise InvalidRequest("no profile is being recorded", code="no_profile")
        if self._running is not None:
            self._running.stop()
            self._write()
        self._command = None
        file = _file(command)
        if not file.is_file():
            raise InvalidRequest("the profile could not be written")
        return WorkerReport(file=str(file), steps=steps)

    def _write(self) -> None:
        running, self._running = self._running, None
        if running is not None and self._command is not None:
            running.export_chrome_trace(str(_file(self._command)))


def _file(command: StartProfile) -> Path:
    return Path(command.folder) / f"{command.name}{SUFFIX}"
