"""Supervision: who is restarted after a crash, how often, and who answers what the crashed actor owed.

Children that share a `group` fall and rise together. A crash first hands the message that was in hand to the child's
`on_crash`, which answers the requests behind it; then the unit is built anew and goes on with what is queued. A child
whose strategy is "stop", or a unit that crashes too often, ends the supervisor with the root cause itself, which says
which actor it was and what to do, and hands over the queued messages too. One that returns, or was cancelled alone,
while its mailboxes are open has crashed too: else it would be alive but deaf.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.restart_intensity import Crashes, Intensity

logger = logging.getLogger("troupellm.engine")

Strategy = Literal["restart", "stop"]


class Actor(Protocol):
    async def run(self, *, task_status: TaskStatus[None] = ...) -> None: ...


class ActorLeft(RuntimeError):
    """An actor ended although its mailboxes are open and it had not been asked to end."""


class Child(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    build: Callable[[], Actor]
    """Makes a fresh actor around the same mailboxes."""
    mailboxes: tuple[Mailbox[Any, Any], ...] = ()
    strategy: Strategy = "stop"
    intensity: Intensity | None = None
    """The supervisor's own if None; of a group, its first member's counts."""
    hint: str = "see the traceback"
    """The advice in the error when the crash ends everything."""
    group: str | None = None
    """Children of one group are restarted together."""
    on_crash: Callable[[Exception, list[Any]], None]
    """Given the root cause and the owed messages, answers every caller that waits for them."""


class Supervisor:
    """Runs children until they return; `restarts` counts by child."""

    def __init__(self, children: Sequence[Child], clock: Clock, intensity: Intensity | None = None) -> None:
        self._units: dict[str, list[Child]] = {}
        for child in children:
            self._units.setdefault(child.group or child.name, []).append(child)
        self._clock = clock
        self._intensity = intensity or Intensity()
        self._failure: Exception | None = None
        self._stopping = False
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._verdicts: dict[str, Exception] = {}
        self._returned = {name: anyio.Event() for name in self._units}
        self.restarts: dict[str, int] = {child.name: 0 for child in children}

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start the units in order, then wait until every child has returned.

        Raises:
            Exception: the root cause of the crash that could not be mended, with the actor's name as a note.
        """
        try:
            async with anyio.create_task_group() as group:
                for unit in self._units.values():
                    await group.start(self._run_unit, unit)
                task_status.started()
        except BaseExceptionGroup:
            if self._failure is None:
                raise
        finally:
            for event in self._returned.values():
                event.set()
        if self._failure is not None:
            raise self._failure

    def let_return(self) -> None:
        """From now on a child may return although its mailboxes are open."""
        self._stopping = True

    def crash(self, name: str, cause: Exception) -> None:
        """End a running child as if it had raised `cause`."""
        if name in self._scopes:
            self._verdicts[name] = cause
            self._scopes[name].cancel()

    async def returned(self, name: str) -> None:
        """Wait until this unit (a group, or a child without one) has ended; an unknown one has."""
        if name in self._returned:
            await self._returned[name].wait()

    async def _run_unit(self, unit: Sequence[Child], *, task_status: TaskStatus[None]) -> None:
        crashes = Crashes(unit[0].intensity or self._intensity, self._clock)
        started = False
        while True:
            causes: list[Exception] = []
            try:
                async with anyio.create_task_group() as group:
                    for child in unit:
                        await group.start(self._run_child, child, causes)
                    if not started:
                        task_status.started()
                        started = True
            except BaseExceptionGroup:
                if not causes:
                    raise
            for child in unit:  # on asyncio a task that was cancelled alone ends without a word
                if not causes and (left := self._left_early(child)) is not None:
                    left.add_note(f"actor: {child.name}")
                    causes.append(left)
            if not causes:
                self._returned[unit[0].group or unit[0].name].set()
                return
            ends = crashes.add() or any(child.strategy == "stop" for child in unit)
            for child in unit:
                owed = [
                    message
                    for mailbox in child.mailboxes
                    for message in (mailbox.abandon() if ends else mailbox.abandon_in_hand())
                ]
                child.on_crash(causes[0], owed)
            if ends:
                if self._failure is None:
                    self._failure = causes[0]
                    causes[0].add_note(f"hint: {_guilty(unit, causes[0]).hint}")
                raise causes[0]
            logger.error("the actor %s crashed and starts again", _guilty(unit, causes[0]).name, exc_info=causes[0])
            for child in unit:
                self.restarts[child.name] += 1

    async def _run_child(self, child: Child, causes: list[Exception], *, task_status: TaskStatus[None]) -> None:
        try:
            with anyio.CancelScope() as scope:
                self._scopes[child.name] = scope
                await child.build().run(task_status=task_status)
            if (verdict := self._verdicts.pop(child.name, None)) is not None:
                raise verdict
            if (left := self._left_early(child)) is not None:
                raise left
        except Exception as error:
            cause = _root_cause(error)
            if not causes:  # the first crash of the unit; what its siblings raise in the fall is noise
                cause.add_note(f"actor: {child.name}")
                causes.append(cause)
            raise

    def _left_early(self, child: Child) -> ActorLeft | None:
        if self._stopping or all(mailbox.closed for mailbox in child.mailboxes):
            return None
        return ActorLeft(f"the actor {child.name} ended although its mailbox is open")


def _guilty(unit: Sequence[Child], cause: Exception) -> Child:
    """Whose name the cause bears."""
    notes = getattr(cause, "__notes__", ())
    return next((child for child in unit if f"actor: {child.name}" in notes), unit[0])


def _root_cause(error: Exception) -> Exception:
    """The one exception inside nested groups of one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
