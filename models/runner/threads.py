"""How many threads a step computes with, from what steps of its size took lately.

A small step is a few hundred short parallel regions, each of which waits for its slowest thread. Where another program
(or the event loop of the host) keeps a core busy, that wait is a time slice, and one thread alone is several times as
fast; on a quiet machine all threads are. Our own products do not depend on the number of threads, so the tokens do not.
A library's may, in their last bits: where those count, the number stays.

A step of many tokens is mostly work, and one thread would make it as many times slower as there are cores. One thread
is tried for it only after a step in which the calling thread stood still, and only where the trial takes a few seconds
at most. On a quiet machine such a step is rare, so the trial is too.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Self

import torch

LARGE_STEP_TOKENS = 128
"""From here on the work outweighs the waiting on a quiet machine. All such steps are judged together, by the token."""
STANDSTILL = 1.3
"""A large step that took so many times the processor time of the thread that called it waited for something else.
A short wait for its own threads is processor time, since they spin for some milliseconds; then they sleep. So a quiet
machine comes near it only where a step is cut very unevenly."""
TRIAL_SHARE = 32
"""The slower choice is tried again when steps have taken so many times what its last trial took."""
TRIAL_SECONDS = 15.0
"""Or when they have taken so long: what was measured of it may be of another time."""
SLICE_SECONDS = 0.005
"""Short steps that follow each other are remembered together until they have taken so long, which is about a time slice
of the operating system. Beside a busy program most of them are as fast as on a quiet machine, and a few wait for a time
slice, which takes longer than ten fast ones: the mean of a few steps misses the wait."""
RECENT_SLICES, RECENT_LARGE_STEPS = 8, 3
"""Of each choice, that are remembered; their mean counts. A step that takes longer than a slice is one by itself."""
LONGEST_TRIAL_SECONDS = TRIAL_SECONDS / 4
"""A large step that would take longer with one thread, on a quiet machine, is not a reason to try it."""
LONGEST_STEP = 5
"""The slowest of the remembered slices counts as so many times their median at most: a step in which the process was
stopped for a while says nothing about threads. Further slow slices count in full."""
FIRST_STEPS = 2
"""Steps that each choice gets at first."""


_lock = threading.Lock()
_given: "list[GivenThreads]" = []
"""Oldest first."""


class GivenThreads:
    """The number of threads of an engine, for as long as it lives.

    Torch keeps a number per thread, and one that new threads of the process begin with: the one that was set last,
    wherever. That may be another engine's own, or the one thread of a step that it is in, so none of the two is asked
    where there are others: an engine without a number of its own gets what the process had before all of them. Engines
    may end in any order: who ends before a later one leaves it to that one to put back what was found.
    """

    def __init__(self, number: int | None) -> None:
        """Of the calling thread, which steps are made on. None: what the process has."""
        with _lock:
            self._thread = threading.get_ident()
            others = [given for given in _given if given._thread != self._thread]
            self._found: int = others[-1].number if others else torch.get_num_threads()
            processes = others[0]._found if others else self._found
            self._changes = number is not None or bool(others)
            self.number: int = processes if number is None else number
            if self._changes:
                torch.set_num_threads(self.number)
            _given.append(self)

    def put_back(self) -> None:
        """Once, on the same thread."""
        with _lock:
            place = _given.index(self)
            del _given[place]
            if place < len(_given):
                _given[place]._found = self._found
                _given[place]._changes |= self._changes
            elif self._changes:
                torch.set_num_threads(self._found)


@dataclass(slots=True)
class _Slice:
    """Steps that followed each other; units: steps, or tokens of large ones."""

    seconds: float = 0.0
    units: int = 0


@dataclass(slots=True)
class _Choice:
    """seconds: of a step, or of a token of a large one, from the `recent` slices of all `steps`."""

    recent: deque[_Slice]
    seconds: float = 0.0
    steps: int = 0

    def learn(self, seconds: float, units: int) -> None:
        self.steps += 1
        if not self.recent or self.recent[-1].seconds >= SLICE_SECONDS:
            self.recent.append(_Slice())
        self.recent[-1].seconds += seconds
        self.recent[-1].units += units
        ordered = sorted(part.seconds / part.units for part in self.recent)
        ordered[-1] = min(ordered[-1], LONGEST_STEP * ordered[(len(ordered) - 1) // 2])
        self.seconds = sum(ordered) / len(ordered)


@dataclass(slots=True)
class _Record:
    """For steps of about one size."""

    all_threads: _Choice
    one_thread: _Choice
    since_trial: float = 0.0
    """Seconds of steps."""
    trial: float = 0.0
    """Seconds of the steps of the last trial."""
    trying: float = 0.0
    """Seconds of the steps of the trial that is under way."""
    stood_still: bool = True
    """Whether the last step of all threads did. One of few tokens is too short for that to be told."""
    expected: float = 0.0
    """How many times as long as with one thread a step takes with all, from steps of another size; 0: not known."""

    @classmethod
    def remembering(cls, slices: int, *, stood_still: bool = True, expected: float = 0.0) -> Self:
        """slices: of each choice, that count."""
        return cls(
            _Choice(deque(maxlen=slices)), _Choice(deque(maxlen=slices)), stood_still=stood_still, expected=expected
        )

    @property
    def ratio(self) -> float:
        """How many times as long as with one thread a step takes with all; 0: not known."""
        known = self.all_threads.steps and self.one_thread.seconds > 0.0  # a coarse clock may show no time
        return self.all_threads.seconds / self.one_thread.seconds if known else 0.0

    def choose_one(self, units: int = 1) -> bool:
        """units: of what the choices' seconds are of, in the step that begins."""
        if not self.stood_still:
            return False
        if self.all_threads.steps < FIRST_STEPS:
            return self.expected > 1.0
        if self.one_thread.steps < FIRST_STEPS:
            return True
        one = self.one_thread.seconds < self.all_threads.seconds
        slower = self.all_threads if one else self.one_thread
        due = TRIAL_SHARE * max(self.trial, slower.seconds * units)
        return one != (self.since_trial >= min(due, TRIAL_SECONDS))

    def learn(self, one: bool, seconds: float, units: int = 1) -> None:
        choice, other = (self.one_thread, self.all_threads) if one else (self.all_threads, self.one_thread)
        tried = choice.seconds > other.seconds
        choice.learn(seconds, units)
        if self.expected > 1.0 and self.one_thread.steps == FIRST_STEPS:
            while self.all_threads.steps < FIRST_STEPS:
                self.all_threads.learn(self.expected * self.one_thread.seconds, 1)
        self.since_trial += seconds
        if not tried:
            return
        self.trying += seconds
        if seconds / units >= other.seconds or choice.seconds <= other.seconds:  # else another step is tried at once
            self.trial, self.trying, self.since_trial = self.trying, 0.0, 0.0


class StepThreads:
    """Sets the thread count around each step; outside of steps it is what the worker was given."""

    def __init__(
        self,
        most: int,
        *,
        steady: bool = False,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = perf_counter,
        processor_clock: Callable[[], float] = thread_time,
    ) -> None:
        """
        Args:
            steady: never to change the number.
            processor_clock: seconds of processor time that the calling thread has had.
        """
        self._steady = steady or most == 1
        self._processor_clock = processor_clock
        self._most, self._set_threads, self._clock = most, set_threads, clock
        self._records: dict[int, _Record] = {}
        self._latest = 0
        """Key of the record of the last step that was not large."""
        self._large = _Record.remembering(RECENT_LARGE_STEPS, stood_still=False)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Run the body with the better choice for so many tokens."""
        if self._steady or not tokens:
            yield
            return
        large = tokens >= LARGE_STEP_TOKENS
        record, units = (self._large, tokens) if large else (self._record(tokens), 1)
        one = record.choose_one(units)
        if one:
            self._set_threads(1)
        begin, processor_begin = self._clock(), self._processor_clock()
        try:
            yield
        finally:
            if one:
                self._set_threads(self._most)
        seconds = self._clock() - begin
        if large and not one:
            may_try = record.ratio > 1.0 or seconds * self._most < LONGEST_TRIAL_SECONDS
            record.stood_still = may_try and seconds > STANDSTILL * (self._processor_clock() - processor_begin)
        record.learn(one, seconds, units)

    def _record(self, tokens: int) -> _Record:
        """Of steps of about so few tokens. Those of another size tell whether the first ones take one thread."""
        key = tokens.bit_length()
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record.remembering(RECENT_SLICES, expected=self._expected(key))
        self._latest = key
        return record

    def _expected(self, key: int) -> float:
        """The latest ratio, unless it is of a very different size: more tokens are more work for each wait. A ratio
        above the number of threads is not explained by the work at all."""
        latest = self._records.get(self._latest)
        if latest is None or (abs(key - self._latest) > 1 and latest.ratio < self._most):
            return 0.0
        return latest.ratio
