"""How often something may crash, and for how long that may stop its service, before that is one time too many."""

from collections import deque
from math import inf

import msgspec

from troupellm.actors.runtime.ports import Clock

FEW = 4
"""Crashes that never are one too many because of the time that they have cost."""


class Intensity(msgspec.Struct, frozen=True):
    """More than `restarts` crashes within `seconds` escalate, and so does one more than a few after a long outage.

    A crash counts for as long as `seconds` however slowly the next one comes: the longest cycle of crash and restart,
    times `restarts`, must fit in.
    """

    restarts: int = 3
    seconds: float = 60.0
    outage: float = inf
    """Seconds without service that the crashes within `seconds` may cost together."""


class Crashes:
    """Counts crashes against an intensity."""

    def __init__(self, intensity: Intensity, clock: Clock) -> None:
        self._intensity = intensity
        self._clock = clock
        self._times: deque[float] = deque()
        self._costs: deque[float] = deque()
        """Seconds without service, of each crash."""

    def __str__(self) -> str:
        seconds = self._intensity.seconds
        return f"{len(self._times)} times in {seconds:g} s, {sum(self._costs):.0f} s of them without service"

    def add(self, cost: float = 0.0) -> bool:
        """One more, now, which has cost so many seconds of service until now; True when that is one too many."""
        now = self._clock.now()
        self._times.append(now)
        self._costs.append(cost)
        while self._times[0] < now - self._intensity.seconds:
            self._times.popleft()
            self._costs.popleft()
        crashes = len(self._times)
        return crashes > self._intensity.restarts or (crashes > FEW and sum(self._costs) > self._intensity.outage)

    def charge(self, cost: float) -> None:
        """The last one has cost so many seconds more."""
        if self._costs:
            self._costs[-1] += cost

    def forgive(self) -> None:
        """There is progress: what came before does not count any more."""
        self._times.clear()
        self._costs.clear()
