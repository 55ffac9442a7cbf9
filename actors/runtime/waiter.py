"""The wait port: suspend one task until another one calls `wake`.

The one primitive under every mailbox and stream. Two backends, picked by what runs right now: an asyncio future
(production; asyncio and uvloop) and a trio task wait (the simulator). A waiter serves one wait, is woken from the event
loop's own thread, and losing it to a cancellation loses nothing, because it carries no value.
"""

import asyncio  # noqa: TID251 - the port itself
import sys
from collections.abc import Awaitable
from typing import Any, Protocol


class Waiter(Protocol):
    def wait(self, timeout: float | None = None) -> Awaitable[bool]:
        """Suspend until `wake`, or for `timeout` seconds at most; tells whether it was woken."""

    def wake(self) -> None:
        """Idempotent; may come before `wait`."""


class AsyncioWaiter:
    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def wait(self, timeout: float | None = None) -> Awaitable[bool]:
        return self._future if timeout is None else self._wait_for(timeout)

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(True)

    async def _wait_for(self, timeout: float) -> bool:
        timer = self._future.get_loop().call_later(timeout, self._settle, False)
        try:
            return await self._future
        finally:
            timer.cancel()

    def _settle(self, woken: bool) -> None:
        if not self._future.done():
            self._future.set_result(woken)


class TrioWaiter:
    __slots__ = ("_task", "_trio", "_woken")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._task: Any = None
        self._woken = False

    async def wait(self, timeout: float | None = None) -> bool:
        if not self._woken:
            if timeout is None:
                await self._suspend()
            else:
                with self._trio.move_on_after(timeout):
                    await self._suspend()
        return self._woken

    async def _suspend(self) -> None:
        self._task = self._trio.lowlevel.current_task()
        await self._trio.lowlevel.wait_task_rescheduled(self._cancelled)

    def wake(self) -> None:
        if self._woken:
            return
        self._woken = True
        if self._task is not None:
            self._trio.lowlevel.reschedule(self._task)
            self._task = None

    def _cancelled(self, _raise_cancel: Any) -> Any:
        self._task = None
        return self._trio.lowlevel.Abort.SUCCEEDED


def new_waiter() -> Waiter:
    """A waiter for the event loop that runs the caller."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return TrioWaiter(trio)
    return AsyncioWaiter()
