"""When nobody has drafted for a while: how long the next look is put off."""

from typing import Final

_SLEEPY: Final = 48
"""Steps without drafts after which there is no hurry."""
_LOOK: Final = 16
"""Steps that a look takes, if it finds nothing."""
_FIRST_SLEEP, _LONGEST_SLEEP = 128, 4096
"""Steps until another look; each look that finds nothing doubles them."""
_OVERSLEPT: Final = 4
"""A look waits for a new row, whose text may be of another kind, up to so many times as long."""
_FOUND: Final = 8
"""Steps with drafts that make a look a success."""


class Idleness:
    """Of steps with so many rows."""

    def __init__(self, like: "Idleness | None" = None) -> None:
        """like: begins as that one is."""
        self._quiet: int = 0 if like is None else like._quiet
        self._sleep: int = _FIRST_SLEEP if like is None else like._sleep
        self._found = 0

    @property
    def asleep(self) -> bool:
        return self._quiet >= _SLEEPY

    @property
    def rested(self) -> bool:
        """Whether it is time for another look, if there is a new row."""
        return self._quiet >= _SLEEPY + self._sleep

    def step(self, *, drafts: bool = False) -> bool:
        """A step with or without drafts, probes left aside; whether it is time for another look in any case."""
        if drafts:
            self._quiet, self._found = 0, self._found + 1
            if self._found >= _FOUND:
                self._sleep = _FIRST_SLEEP
            return False
        self._quiet += 1
        return self._quiet >= _SLEEPY + _OVERSLEPT * self._sleep

    def look(self) -> None:
        """Awake for a few steps."""
        self._quiet, self._found, self._sleep = _SLEEPY - _LOOK, 0, min(2 * self._sleep, _LONGEST_SLEEP)
