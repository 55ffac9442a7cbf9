"""What a rendering has used of what it may, and the errors that end it."""

import threading
import time

import jinja2

COST_PER_LOOK = 500_000
"""Between two looks at the clock, which take some time themselves."""


class TemplateLimit(jinja2.TemplateRuntimeError):
    """A template wants more than it may have."""


class TemplateExhausted(TemplateLimit):
    """A template has used up its cost or time; with more of both it could go on."""


class Used(threading.local):
    """What the rendering on this thread has used; one unit of cost is about a nanosecond."""

    cost = 0
    characters = 0
    seconds = 0.0
    _most = 0
    _most_seconds = 0.0
    _next_look = 0
    _began = 0.0

    def begin(self, most: int, seconds: float) -> None:
        """
        Args:
            most: what it may cost.
            seconds: of the thread's own CPU time that it may take.
        """
        self.cost, self.characters = 0, 0
        self._most, self._most_seconds = most, seconds
        self._next_look = min(COST_PER_LOOK, most)
        self._began = time.thread_time()

    def end(self) -> None:
        self.seconds = time.thread_time() - self._began

    @property
    def left(self) -> int:
        return self._most - self.cost

    def charge(self, cost: int) -> None:
        """Before an operation that costs so much.

        Raises:
            TemplateExhausted: that is more than what is left.
        """
        self.cost += cost
        if self.cost > self._next_look:
            self._look()

    def _look(self) -> None:
        if self.cost > self._most:
            raise TemplateExhausted(f"the template takes more than {self._most // 1_000} steps")
        if time.thread_time() - self._began > self._most_seconds:
            raise TemplateExhausted(f"the template takes more than {self._most_seconds:g} seconds")
        self._next_look = min(self.cost + COST_PER_LOOK, self._most)


used = Used()
