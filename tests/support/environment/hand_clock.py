"""A clock that stands until its test moves it."""


class HandClock:
    """Implements `Clock`; both kinds of time are `time`, in seconds."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time
