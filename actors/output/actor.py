"""Output actor: turns each step's tokens into text and hands it to the readers.

Owns:      the text state of every open sequence, and when each reader is woken next.
Receives:  OutputMessage.
Sends:     plain calls to each request's outbox; StopStringMet and AbortRequest to the scheduler's control lane.
On crash:  restarted empty; the supervisor ends every request that was open, and rows it does not know are ignored.
"""

from collections.abc import Callable
from typing import Never

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from troupellm.actors.output.core import OutputCore
from troupellm.actors.output.detokenizer import TextTables
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import Clock
from troupellm.protocol.messages.output import OutputMessage, RequestClosed
from troupellm.protocol.messages.scheduler import SchedulerControl


class Output:
    """The asynchronous shell: one receive loop."""

    def __init__(
        self,
        inbox: Mailbox[OutputMessage, Never],
        tables: TextTables,
        to_scheduler: Callable[[SchedulerControl], None],
        clock: Clock,
        *,
        flush_interval: float,
        on_closed: Callable[[RequestClosed], None] = lambda closed: None,
        wakes_per_second: float = 0.0,
        most_wakes_per_second: float = 0.0,
    ) -> None:
        """
        Args:
            tables: built once per tokenizer (that takes up to half a second); shared by restarts.
            flush_interval: least seconds between two wakes of one reader, but for first tokens and ends; 0 wakes
                after every step.
            wakes_per_second: of all readers together; fewer of them than would use that up within `flush_interval` are
                woken more often, each at its share. 0 keeps everybody to the interval.
            most_wakes_per_second: of all readers together; more of them are woken less often. 0 is without a bound.
            on_closed: hears of every request that the scheduler has let go of, read or not, with the usage that its
                reader is told: tokens behind stop strings are not in it.
        """
        self._inbox = inbox
        self._clock = clock
        self._core = OutputCore(
            tables,
            to_scheduler,
            flush_interval,
            on_closed,
            wakes_per_second=wakes_per_second,
            most_wakes_per_second=most_wakes_per_second,
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the inbox is closed and empty."""
        task_status.started()
        inbox, core, clock = self._inbox, self._core, self._clock
        timeout: float | None = None
        while await inbox.wait(timeout) or not inbox.closed:
            while (message := inbox.take()) is not None:
                for _ in core.read_prompt(message):
                    await anyio.lowlevel.checkpoint()
                core.handle(message, clock.now())
            for _ in core.flush(clock.now()):
                await anyio.lowlevel.checkpoint()
            timeout = None if core.next_flush is None else max(0.001, core.next_flush - clock.now())
            await anyio.lowlevel.checkpoint()
        for _ in core.flush(float("inf")):
            await anyio.lowlevel.checkpoint()
