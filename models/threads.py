"""How many threads a step computes with, from what steps of its size took lately.

A small step is a few hundred short parallel regions, each of which waits for its slowest thread. Where another program
(or the event loop of the host) keeps a core busy, that wait is a time slice, and one thread alone is several times as
fast; on a quiet machine all threads are. The products do not depend on the number of threads, so the tokens do not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

LARGE_STEP_TOKENS = 128
"""From here on the work outweighs the waiting: always all threads."""
PROBE_STEPS = 32
"""The slower choice is tried again after so many steps, times how much slower it was."""
WEIGHT = 0.4
"""Of the newest step in the average."""


@dataclass(slots=True)
class _Record:
    """Averages for steps of about one size; seconds per step, 0 is unknown."""

    all_threads: float = 0.0
    one_thread: float = 0.0
    steps_since_probe: int = 0

    def choose_one(self) -> bool:
        if not self.all_threads or not self.one_thread:
            return bool(self.all_threads)
        slower, faster = max(self.all_threads, self.one_thread), min(self.all_threads, self.one_thread)
        self.steps_since_probe += 1
        one = self.one_thread < self.all_threads
        if self.steps_since_probe > PROBE_STEPS * slower / faster:
            self.steps_since_probe = 0
            return not one
        return one

    def learn(self, one: bool, seconds: float) -> None:
        known = self.one_thread if one else self.all_threads
        value = WEIGHT * seconds + (1 - WEIGHT) * known if known else seconds
        if one:
            self.one_thread = value
        else:
            self.all_threads = value


class StepThreads:
    """Sets the thread count around each step; outside of steps it is what the worker was given."""

    def __init__(
        self,
        most: int,
        *,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._most, self._set_threads, self._clock = most, set_threads, clock
        self._records: dict[int, _Record] = {}

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Run the body with the better choice for so many tokens."""
        if self._most == 1 or tokens >= LARGE_STEP_TOKENS or not tokens:
            yield
            return
        record = self._records.setdefault(tokens.bit_length(), _Record())
        one = record.choose_one()
        if one:
            self._set_threads(1)
        begin = self._clock()
        try:
            yield
        finally:
            if one:
                self._set_threads(self._most)
        record.learn(one, self._clock() - begin)
