"""The streams under which a worker is killed: the same requests one by one and all at once, and what their clients saw.

The dead worker's last tokens still arrive in the moment after the kill. So the first new token is the one that
ends the longest silence of all streams together: while a worker runs, one of them hears something all the time.
"""

import asyncio
import math
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from troupellm.load_tests.client.client import Target, exchange
from troupellm.load_tests.client.records import RequestRecord, SampleRequest
from troupellm.load_tests.traffic.own_server import START_SECONDS, OwnServer

REQUEST_SECONDS = 300.0
UNDER_WAY = 3
"""Chunks that every stream has had before the worker is killed."""
POLL_SECONDS = 0.005
_BODIES = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7})
"""Every other stream is drawn."""


class Asked(msgspec.Struct, frozen=True):
    """One request, for any server of the model."""

    prompt: str
    max_tokens: int
    drawn: bool


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """The streams' view of one kill. Seconds since then."""

    first_new_token: float
    """Of any stream."""
    every_stream: float
    """Until each of them had had one."""
    failures: list[str]
    """Streams that failed, or have other tokens than alone."""


def requests(count: int, max_tokens: int) -> list[Asked]:
    return [
        Asked(f"Story {number}: once upon a time there was", max_tokens, number % 2 == 1) for number in range(count)
    ]


async def alone(server: OwnServer, asked: Sequence[Asked]) -> list[list[int]]:
    """The tokens of every request, each by itself. Raises RuntimeError when one fails."""
    answers = []
    for record in _records(asked):
        await _ask(server, asked[record.index], record)
        if record.error:
            raise RuntimeError(f"a request by itself failed: {record.error}")
        answers.append(record.token_ids)
    return answers


async def kill_under(server: OwnServer, asked: Sequence[Asked], expected: Sequence[Sequence[int]]) -> Kill:
    """All requests at once; the worker is killed when every one of them is under way.

    Raises:
        RuntimeError: the server has no worker process.
    """
    if not server.workers():
        raise RuntimeError("the server has no worker process to kill")
    records = _records(asked)
    async with asyncio.TaskGroup() as group:
        for one, record in zip(asked, records, strict=True):
            group.create_task(_ask(server, one, record))
        async with asyncio.timeout(START_SECONDS):
            while not all(record.ended or len(record.chunk_times) >= UNDER_WAY for record in records):
                await asyncio.sleep(POLL_SECONDS)
        killed = time.perf_counter()
        os.kill(server.workers()[0], signal.SIGKILL)
    return seen(records, expected, killed)


def seen(records: Sequence[RequestRecord], expected: Sequence[Sequence[int]], killed: float) -> Kill:
    failures = []
    for record, tokens in zip(records, expected, strict=True):
        if record.error:
            failures.append(f"stream {record.index}: {record.error}")
        elif record.ended <= killed:
            failures.append(f"stream {record.index} had ended before the kill: give it more tokens")
        elif record.token_ids != list(tokens):
            where = next(
                (at for at, pair in enumerate(zip(record.token_ids, tokens, strict=False)) if pair[0] != pair[1]),
                min(len(record.token_ids), len(tokens)),
            )
            failures.append(f"stream {record.index}: other tokens than alone from token {where} on")
    first, every = went_on([record.chunk_times for record in records], killed)
    return Kill(first_new_token=first - killed, every_stream=every - killed, failures=failures)


def went_on(chunk_times: Sequence[Sequence[float]], killed: float) -> tuple[float, float]:
    """When the first of the streams went on, and when the last one did; infinity where that never happened."""
    later = sorted(at for times in chunk_times for at in times if at > killed)
    if not later:
        return math.inf, math.inf
    first = max(pairwise([killed, *later]), key=lambda pair: pair[1] - pair[0])[1]
    return first, max(min((at for at in times if at >= first), default=math.inf) for times in chunk_times)


def _records(asked: Sequence[Asked]) -> list[RequestRecord]:
    return [
        RequestRecord(index=index, wanted_tokens=one.max_tokens, ignore_eos=True) for index, one in enumerate(asked)
    ]


async def _ask(server: OwnServer, asked: Asked, record: RequestRecord) -> None:
    body = {**_BODIES[asked.drawn], "ignore_eos": True, "return_token_ids": True}
    target = Target.completions(server.url, model=server.model, body=body, timeout=REQUEST_SECONDS)
    await exchange(target, SampleRequest(prompt=asked.prompt, output_len=asked.max_tokens), record)
