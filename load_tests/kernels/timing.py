"""How long a piece of work takes: again and again on a CPU, as replays of a CUDA graph on a GPU."""

import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch

REPLAYS, CALLS = 5, 20
"""A graph of so many calls is replayed so often; more where calls are short."""
GRAPH_SECONDS = 2e-3
"""That a replay should take at least."""


class Timing(msgspec.Struct, frozen=True):
    """Seconds per call."""

    median: float
    least: float
    runs: int
    """That these are of: on a GPU replays of a graph of many calls."""


def measure(work: Callable[[int], object], device: torch.device, seconds: float) -> Timing:
    """Time `work(number)`, where `number` counts up, so that buffers can take turns."""
    return _measure_graph(work, device, seconds) if device.type == "cuda" else _measure_calls(work, seconds)


def _measure_calls(work: Callable[[int], object], seconds: float) -> Timing:
    work(0)
    begin = time.perf_counter()
    work(1)
    once = max(time.perf_counter() - begin, 1e-7)
    together = max(1, int(2e-4 / once))  # a clock's reading may cost as much as a small piece of work
    spent, number, found = 0.0, 2, list[float]()
    while spent < seconds or len(found) < 3:
        begin = time.perf_counter()
        for _ in range(together):
            work(number)
            number += 1
        taken = time.perf_counter() - begin
        found.append(taken / together)
        spent += taken
    return Timing(median(found), min(found), len(found))


def _measure_graph(work: Callable[[int], object], device: torch.device, seconds: float) -> Timing:
    """Launches are recorded once, so that the host's part does not count."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be making what the work reads
    with torch.cuda.stream(stream):
        for number in range(3):
            work(number)
        stream.synchronize()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(stream)
        work(3)
        end.record(stream)
        end.synchronize()
        once = max(start.elapsed_time(end) * 1e-3, 1e-6)
        calls = max(CALLS, min(1000, int(GRAPH_SECONDS / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(calls):
                work(number)
        graph.replay()
        found, spent = list[float](), 0.0
        while spent < seconds or len(found) < REPLAYS:
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            taken = start.elapsed_time(end) * 1e-3
            found.append(taken / calls)
            spent += taken
    return Timing(median(found), min(found), len(found))
