"""Lines of a batch's files: read with a cap, checked, asked until they are answered; and the result of a bad one."""

import hashlib
import io
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from functools import partial
from typing import BinaryIO

import anyio
import msgspec

from troupellm.protocol.api.batches import BatchLine, BatchResult, LineError, LineResponse
from troupellm.protocol.api.caller import NOBODY, Caller
from troupellm.server.batches.concurrency import Share
from troupellm.server.host.internal_requests import Answered, Inside

GROUP_BYTES = 2**20
GROUP_LINES = 256
"""Lines are read in groups of at most so many, and so many bytes (and one line more)."""
MOST_ATTEMPTS = 5
"""Of a line that the server could not answer; being told to come later is no attempt."""
_BLANK = b" \t\r\n"


class Good(msgspec.Struct, frozen=True):
    """A line that can be answered."""

    number: int
    custom_id: str
    url: str
    body: bytes


class Bad(msgspec.Struct, frozen=True):
    """A line that cannot."""

    number: int
    """From 1, blank lines counted too."""
    result: BatchResult


class Lines:
    """Reads and checks groups of lines; blank ones are passed over. It remembers their names."""

    def __init__(self, source: BinaryIO, urls: Container[str], *, endpoint: str | None, longest: int) -> None:
        """
        Args:
            urls: the routes that lines may ask for.
            endpoint: the route that all of them must ask for; None leaves it to each.
            longest: bytes of a line.
        """
        self._source = source
        self._urls = urls
        self._endpoint = endpoint
        self._longest = longest
        self._number = 0
        self._seen: set[bytes] = set()

    def read(self) -> list[Good | Bad]:
        """The next lines; none at the end. Blocks: call it on a thread."""
        group: list[Good | Bad] = []
        size = 0
        while len(group) < GROUP_LINES and size < GROUP_BYTES:
            line = self._source.readline(self._longest + 1)
            if not line:
                break
            self._number += 1
            if len(line) > self._longest and not line.endswith(b"\n"):
                while (rest := self._source.readline(io.DEFAULT_BUFFER_SIZE)) and not rest.endswith(b"\n"):
                    pass
                group.append(self._bad(None, "line_too_long", f"a line may have at most {self._longest} bytes"))
            elif line.strip(_BLANK):
                group.append(self._check(line))
                size += len(line)
        return group

    def _check(self, text: bytes) -> Good | Bad:
        try:
            parsed = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            invalid = isinstance(error, msgspec.ValidationError)
            reason = str(error) if isinstance(error, msgspec.DecodeError) else "it is nested too deeply, or no UTF-8"
            code = "invalid_request" if invalid else "invalid_json_line"
            return self._bad(_custom_id(text) if invalid else None, code, f"line {self._number}: {reason}")
        name = hashlib.blake2b(parsed.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if name in self._seen:
            return self._bad(parsed.custom_id, "duplicate_custom_id", "another line has this custom_id already")
        self._seen.add(name)
        if self._endpoint is not None and parsed.url != self._endpoint:
            return self._bad(parsed.custom_id, "mismatched_url", f"url must be {self._endpoint} in this batch")
        if parsed.url not in self._urls:
            return self._bad(parsed.custom_id, "invalid_url", "url is none that a line may ask for")
        return Good(self._number, parsed.custom_id, parsed.url, bytes(parsed.body))

    def _bad(self, custom_id: str | None, code: str, message: str) -> Bad:
        return Bad(self._number, failed(custom_id, code, message, self._number))


Keep = Callable[[int, BatchResult], Awaitable[None]]
"""Stores the result of a line."""


async def answer_lines(
    inside: Inside, lines: AsyncIterator[Good | Bad], share: Share, keep: Keep, *, caller: Caller = NOBODY
) -> None:
    """Answer all lines. No more of them are in memory than the share lets out.

    Args:
        caller: the owner of the lines.
    """
    async with anyio.create_task_group() as group:
        async for line in lines:
            if isinstance(line, Bad):
                await keep(line.number, line.result)
            else:
                await share.claim()
                group.start_soon(partial(ask, inside, line, share, keep, caller=caller))


async def ask(inside: Inside, line: Good, share: Share, keep: Keep, *, caller: Caller = NOBODY) -> None:
    """Ask for a claimed line: patiently where the server has no room, a few times where it fails. It has its room in
    the engine until `keep` has its result."""
    attempts = 0
    try:
        while True:
            await share.enter()
            try:
                answer = await inside.post(line.url, line.body, caller=caller)
                attempts += answer.status != 429
                wait = answer.retry_after if attempts < MOST_ATTEMPTS else None
                if wait is None:
                    if answer.retry_after is None:
                        share.ended()
                    await keep(line.number, answered(line, answer))
                    return
            finally:
                share.leave()
            share.pause(wait)
    finally:
        share.release()


def answered(line: Good, answer: Answered) -> BatchResult:
    """The output line of an answer, good or bad."""
    response = LineResponse(
        status_code=answer.status, request_id=answer.request_id, body=msgspec.Raw(answer.body or b"null")
    )
    return BatchResult(id=_new_id(), custom_id=line.custom_id, response=response)


def failed(custom_id: str | None, code: str, message: str, number: int | None = None) -> BatchResult:
    """The output line of a line that was not run."""
    error = LineError(code=code, message=message[:512], line=number)
    return BatchResult(id=_new_id(), custom_id=custom_id, error=error)


def is_good(result: BatchResult) -> bool:
    return result.response is not None and result.response.status_code == 200


def count_lines(source: BinaryIO, most: int) -> int:
    """How many lines are not blank; it stops counting behind `most`. Blocks."""
    number, blank = 0, True
    while number <= most and (piece := source.readline(io.DEFAULT_BUFFER_SIZE)):
        blank = blank and not piece.strip(_BLANK)
        if piece.endswith(b"\n"):
            number, blank = number + (not blank), True
    return number + (not blank)


def _custom_id(text: bytes) -> str | None:
    """Of a line that is wrong elsewhere, so that its error finds its owner."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) and len(name) <= 512 else None


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
