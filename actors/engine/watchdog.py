"""Watchdog actor: notices when there is work and nothing moves, which no exception tells.

Owns:      what it saw at its last looks.
Receives:  nothing; its inbox only tells it when to stop.
Sends:     nothing; calls the measures that the system gives it.
On crash:  restarted; no task waits for it.

A step that is being computed counts as progress: its deadline is the worker's affair. Looks are counted, not seconds,
so that a suspended machine or a blocked event loop raises no alarm.
"""

import logging
from collections.abc import Callable
from typing import Never

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.messages.snapshot import ActorSnapshot, SchedulerSnapshot

logger = logging.getLogger("troupellm.engine")

LOOK_SECONDS = 1.0
PATIENCE = 2
"""Looks that a gentle measure gets before the next one."""
_ORDER = ("output", "metrics", "worker", "scheduler", "guide", "intake", "adapters")
"""The order in which actors are checked, downstream first: an actor upstream may only be waiting for room."""


class NoProgress(RuntimeError):
    """There is work, and nothing moves."""


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that change while the engine works."""

    scheduler: SchedulerSnapshot
    actors: tuple[ActorSnapshot, ...]
    last_step: float | None
    computing: bool
    """The worker computes a step, or is being replaced."""


class Stuck(msgspec.Struct, frozen=True):
    actor: str
    what: str


class Looks:
    """Compares pulses. `looks` is how often the same trouble was seen in a row."""

    def __init__(self) -> None:
        self.looks = 0
        self._taken: dict[str, int] = {}
        self._steps: tuple[int, float | None] | None = None
        self._trouble: Stuck | None = None

    def look(self, pulse: Pulse) -> Stuck | None:
        """The trouble that was there at the last look too, and at this one; None when something has moved."""
        stuck = self._find(pulse)
        self._taken = _taken(pulse)
        self._steps = (pulse.scheduler.steps, pulse.last_step)
        self.looks = self.looks + 1 if stuck is not None and stuck == self._trouble else int(stuck is not None)
        self._trouble = stuck
        return stuck

    def _find(self, pulse: Pulse) -> Stuck | None:
        taken = _taken(pulse)
        waiting = {box.name for actor in pulse.actors for box in actor.mailboxes if box.depth}
        for name in _ORDER:
            if name in waiting and taken[name] == self._taken.get(name) and not (name == "worker" and pulse.computing):
                return Stuck(name, "messages wait and none is taken")
        scheduler = pulse.scheduler
        if pulse.computing or waiting or (scheduler.steps, pulse.last_step) != self._steps:
            return None
        if scheduler.plans_in_flight:
            return Stuck("worker", "a plan was sent and nothing is computed")
        if scheduler.halted:
            return None
        if scheduler.running or scheduler.waiting > scheduler.held:  # paused ones are neither, and give up their blocks
            return Stuck("scheduler", "sequences could run and nothing is planned")
        return None


class Watchdog:
    """The asynchronous shell."""

    def __init__(
        self,
        inbox: Mailbox[Never, Never],
        look: Callable[[], Pulse],
        *,
        timeout: float,
        alarm: Callable[[str | None], None],
        mend: Callable[[Stuck], None],
        crash: Callable[[str, Exception], None],
    ) -> None:
        """
        Args:
            timeout: seconds without progress before anything is done.
            alarm: hears what is wrong, and None when it is not any more.
            mend: a measure that costs no request anything.
            crash: ends an actor with an error, for supervision to answer.
        """
        self._inbox = inbox
        self._look = look
        self._most = max(1, round(timeout / LOOK_SECONDS))
        self._alarm = alarm
        self._mend = mend
        self._crash = crash
        self._looks = Looks()
        self._alarmed = False

    def check(self) -> None:
        """One look, and what follows from it."""
        pulse = self._look()
        stuck = self._looks.look(pulse)
        if stuck is None or self._looks.looks < self._most:
            if self._alarmed and stuck is None:
                self._alarmed = False
                logger.info("the engine moves again")
                self._alarm(None)
            return
        text = f"no progress: {stuck.actor}: {stuck.what}"
        if self._looks.looks == self._most:  # each trouble gets the gentle measure first, one behind another too
            self._alarmed = True
            logger.error("%s; state: %s", text, msgspec.json.encode(pulse).decode())
            self._alarm(text)
            self._mend(stuck)
        elif self._looks.looks >= self._most + PATIENCE:
            self._looks = Looks()
            self._crash(stuck.actor, NoProgress(text))

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while not self._inbox.closed:
            await self._inbox.wait(LOOK_SECONDS)
            self.check()


def _taken(pulse: Pulse) -> dict[str, int]:
    """Messages taken so far, by mailbox."""
    return {box.name: box.messages - box.depth for actor in pulse.actors for box in actor.mailboxes}
