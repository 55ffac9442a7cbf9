"""The engine's open requests, from the door to their end, and the watch over readers who stay away.

`StallWatch`
Owns:      nothing; reads when each outbox paused.
Receives:  nothing; its inbox only tells it when to stop.
Sends:     AbortRequest to the scheduler.
On crash:  restarted; no task waits for it.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Never

import anyio
from anyio.abc import TaskStatus

from troupellm.actors.admission.admission import AdmissionSlot
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import InvalidRequest, RequestAborted, TroupeError
from troupellm.protocol.messages.scheduler import AbortRequest, SchedulerControl
from troupellm.protocol.params.outputs import Usage

_CHECKS_PER_TIMEOUT = 4


class OpenRequests:
    """Every request that has a place and has not ended."""

    def __init__(
        self,
        clock: Clock,
        to_scheduler: Callable[[SchedulerControl], None],
        on_cancelled: Callable[[str], None] = lambda by: None,
        on_invalid: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_cancelled` hears who ended a request early: client, stall, shutdown, admin. `on_invalid` hears of
        each that was refused before the scheduler saw it."""
        self._clock = clock
        self._to_scheduler = to_scheduler
        self._on_cancelled = on_cancelled
        self._on_invalid = on_invalid
        self._numbers = count(1)
        self._open: dict[int, LocalOutbox] = {}
        self._ids: dict[int, str] = {}
        self._owed: dict[int, AdmissionSlot] = {}
        """Places whose requests the scheduler has not closed yet: what they used is not known."""
        self._emptied: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LocalOutbox]:
        """A copy: what the caller does may end requests."""
        return iter(list(self._open.values()))

    def add(
        self,
        slot: AdmissionSlot,
        arrival: float,
        budget: int | None,
        on_wake: Callable[[LocalOutbox], None] | None = None,
        request_id: str = "",
    ) -> LocalOutbox:
        outbox = LocalOutbox(
            next(self._numbers),
            arrival=arrival,
            slot=slot,
            clock=self._clock,
            budget=budget,
            to_scheduler=self._to_scheduler,
            on_terminal=self._remove,
            on_abort=partial(self._on_cancelled, "client"),
            on_wake=on_wake,
        )
        self._open[outbox.request] = outbox
        self._ids[outbox.request] = request_id
        self._owed[outbox.request] = slot
        slot.handed_over = True
        outbox.quota = slot.quota
        return outbox

    def named(self, request_id: str) -> list[LocalOutbox]:
        """Those of that id, and those of a call of that id, which number its prompts behind it."""
        numbered = re.compile(re.escape(request_id) + r"(-\d+)?")
        return [self._open[number] for number, name in self._ids.items() if numbered.fullmatch(name)]

    def closed(self, request: int, spent: Usage) -> None:
        """The scheduler has let go of a request, which its reader may have left long before."""
        slot = self._owed.pop(request, None)
        if slot is not None:
            slot.settle(spent.prompt_tokens, spent.completion_tokens)

    def end(self, outbox: LocalOutbox, error: TroupeError, *, by: str | None = None) -> None:
        """End one request from outside the flow: its reader gets the error, the scheduler forgets it.

        Args:
            by: who wanted that; None for a failure.
        """
        if by is not None and not (outbox.terminal or outbox.cancelled):
            self._on_cancelled(by)
        owed = self._owed.pop(outbox.request, None)
        outbox.fail(error)
        if owed is not None:  # also where it was never opened the scheduler may know it, and tells what it has used
            self._owed[outbox.request] = owed
        self._to_scheduler(AbortRequest(outbox.request))

    def end_all(self, make_error: Callable[[], TroupeError], *, by: str | None = None) -> None:
        """Each gets an error of its own, since raising one changes it."""
        for outbox in self:
            self.end(outbox, make_error(), by=by)

    async def wait_empty(self, timeout: float) -> bool:
        """Until nothing is open, or False after `timeout` seconds."""
        if not self._open:
            return True
        waiter = new_waiter()
        self._emptied.append(waiter)
        return await waiter.wait(timeout)

    def _remove(self, request: int) -> None:
        outbox = self._open.pop(request, None)
        self._ids.pop(request, None)
        if outbox is not None and outbox.prompt_token_ids is None:  # the scheduler never hears of it
            self.closed(request, Usage(prompt_tokens=0, completion_tokens=0))
            if isinstance(outbox.error, InvalidRequest):
                self._on_invalid()
        if not self._open:
            waiters, self._emptied = self._emptied, []
            for waiter in waiters:
                waiter.wake()


class StallWatch:
    """Ends requests whose reader has left them paused for longer than `timeout` seconds."""

    def __init__(self, inbox: Mailbox[Never, Never], requests: OpenRequests, clock: Clock, timeout: float) -> None:
        self._inbox = inbox
        self._requests = requests
        self._clock = clock
        self._timeout = timeout

    def check(self) -> None:
        now = self._clock.now()
        for outbox in self._requests:
            if outbox.paused_since is not None and now - outbox.paused_since >= self._timeout:
                text = f"the reader took nothing for {self._timeout:g} s"
                self._requests.end(outbox, RequestAborted(text, code="reader_stalled"), by="stall")

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while not self._inbox.closed:
            await self._inbox.wait(self._timeout / _CHECKS_PER_TIMEOUT)
            self.check()
