"""How often something may crash before that is one time too many."""

from collections import deque

import msgspec

from troupellm.actors.ports import Clock


class Intensity(msgspec.Struct, frozen=True):
    """More than `restarts` crashes within `seconds` escalate."""

    restarts: int = 3
    seconds: float = 60.0


class Crashes:
    """Counts crashes against an intensity."""

    def __init__(self, intensity: Intensity, clock: Clock) -> None:
        self._intensity = intensity
        self._clock = clock
        self._times: deque[float] = deque()

    def __str__(self) -> str:
        return f"{len(self._times)} times in {self._intensity.seconds:g} s"

    def add(self) -> bool:
        """One more, now; True when that is one too many."""
        now = self._clock.now()
        self._times.append(now)
        while self._times[0] < now - self._intensity.seconds:
            self._times.popleft()
        return len(self._times) > self._intensity.restarts

    def forgive(self) -> None:
        """There is progress: what came before does not count any more."""
        self._times.clear()
