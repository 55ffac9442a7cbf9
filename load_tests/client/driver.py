"""The run: requests leave by the schedule, independent of the replies."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from troupellm.load_tests.client.client import Target, exchange
from troupellm.load_tests.client.records import RequestRecord, SampleRequest


class Run(msgspec.Struct):
    records: list[RequestRecord]
    start: float
    """On `time.perf_counter`."""
    duration: float


async def drive(
    target: Target,
    samples: Sequence[SampleRequest],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    ignore_eos: bool = False,
    time_limit: float = 600.0,
    on_end: Callable[[RequestRecord], object] | None = None,
) -> Run:
    """Send every sample at its arrival time and wait for all answers, `time_limit` seconds at most.

    Open loop: a slow server makes requests pile up, it does not slow the arrivals. With `max_concurrency` a request
    that is due waits for a slot, and that wait is recorded as its queue time, apart from the server's own times.
    """
    slots = asyncio.Semaphore(max_concurrency or max(1, len(samples)))
    start = time.perf_counter()
    records = [
        RequestRecord(index=index, wanted_tokens=sample.output_len, ignore_eos=ignore_eos, scheduled=start + arrival)
        for index, (sample, arrival) in enumerate(zip(samples, arrivals, strict=True))
    ]

    async def send(record: RequestRecord) -> None:
        record.released = time.perf_counter()
        try:
            async with slots:
                await exchange(target, samples[record.index], record)
        finally:
            if on_end is not None:
                on_end(record)

    try:
        async with asyncio.timeout(time_limit), asyncio.TaskGroup() as group:
            for record in records:
                if (wait := record.scheduled - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(record))
    except TimeoutError:
        for record in records:
            if not record.sent:
                record.judge("not sent: the run's time limit")
    last = max((record.ended for record in records), default=start)
    return Run(records=records, start=start, duration=max(last - start, 1e-9))
