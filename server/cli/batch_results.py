"""The output file of `run-batch`: results in the order of the input's lines.

The output file is its own progress: it holds the results of the first lines, whole, whenever the program ends. The next
run checks that they belong to the same input and goes on behind them. Results that come early wait in memory for those
before them, of which there are never many.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread
import msgspec

from troupellm.protocol.api.batches import BatchResult
from troupellm.protocol.errors import TroupeError
from troupellm.server.base.threads import offload
from troupellm.server.batches.concurrency import Share
from troupellm.server.batches.lines import Bad, Good, Lines, answer_lines, is_good
from troupellm.server.host.internal_requests import Inside

AHEAD = 4
"""So many times as many results as requests in flight may wait for one before them."""
LONGEST_PAUSE = 5.0
"""Seconds. No key has limits here, so the cause of a refusal is soon over."""


class ResumeError(TroupeError):
    """The output file holds something else than the beginning of this batch's results."""

    default_code = "output_differs"


class Tally(msgspec.Struct):
    completed: int = 0
    failed: int = 0
    resumed: int = 0
    """Of those, found in the output file."""


class Writer:
    """Writes results in the order of their lines."""

    def __init__(self, output: BinaryIO, ahead: int, on_result: Callable[[BatchResult], None]) -> None:
        self._output = output
        self._ahead = ahead
        self._on_result = on_result
        self._order: list[int] = []
        """Lines that have no result in the file yet; from the front."""
        self._results: dict[int, BatchResult] = {}
        self._moved = anyio.Event()

    async def expect(self, line: int) -> None:
        """A line comes; waits while too many wait for an early one."""
        while len(self._order) >= self._ahead:
            self._moved = anyio.Event()
            await self._moved.wait()
        self._order.append(line)

    async def put(self, line: int, result: BatchResult) -> None:
        self._results[line] = result
        ready = []
        while self._order and self._order[0] in self._results:
            ready.append(self._results.pop(self._order.pop(0)))
        if not ready:
            return
        self._output.write(b"".join([msgspec.json.encode(each) + b"\n" for each in ready]))
        self._output.flush()
        for each in ready:
            self._on_result(each)
        self._moved.set()


async def answer_all(
    inside: Inside,
    source: BinaryIO,
    output: BinaryIO,
    *,
    most: int,
    longest: int,
    known: list[str | None],
    on_result: Callable[[BatchResult], None],
) -> None:
    """Answer every line of `source` that is not known.

    Args:
        most: lines in flight at once.
        longest: bytes of a line.
        known: names of the first lines, whose results are in the output already.

    Raises:
        ResumeError: they are others.
        OSError: a file cannot be read or written.
    """
    share, writer = Share(most, longest_pause=LONGEST_PAUSE), Writer(output, AHEAD * most, on_result)
    lines = Lines(source, inside.urls, endpoint=None, longest=longest)

    async def unknown() -> AsyncIterator[Good | Bad]:
        place = 0
        while found := await _read(lines, source):
            for line in found:
                place += 1
                if place <= len(known):
                    _compare(line, known[place - 1], place)
                else:
                    await writer.expect(line.number)
                    yield line
        if place < len(known):
            raise ResumeError(f"the output file has {len(known)} results, the input only {place} requests")

    await answer_lines(inside, unknown(), share, writer.put)


async def _read(lines: Lines, source: BinaryIO) -> list[Good | Bad]:
    if source is sys.stdin.buffer:  # its writer may never end, and must not keep us from ending
        return await anyio.to_thread.run_sync(lines.read, abandon_on_cancel=True)
    return await offload(lines.read)


def _compare(line: Good | Bad, known: str | None, place: int) -> None:
    name = line.custom_id if isinstance(line, Good) else line.result.custom_id
    if name != known:
        raise ResumeError(f"result {place} of the output file is not that of request {place} of the input")


def resume(path: Path, tally: Tally) -> list[str | None]:
    """Names of the results that a file has, which is cut behind the last whole one. Blocks.

    Raises:
        ResumeError: it holds something else.
        OSError: it cannot be read or cut.
    """
    names: list[str | None] = []
    whole = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                result = msgspec.json.decode(line, type=BatchResult)
            except msgspec.DecodeError:
                message = f"line {len(names) + 1} of the output file is no result of a batch: choose another file"
                raise ResumeError(message) from None
            names.append(result.custom_id)
            count(tally, result)
            whole += len(line)
        file.truncate(whole)
        file.flush()
        os.fsync(file.fileno())
    tally.resumed = len(names)
    return names


def count(tally: Tally, result: BatchResult) -> None:
    if is_good(result):
        tally.completed += 1
    else:
        tally.failed += 1
