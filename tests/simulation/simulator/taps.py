"""Where the simulation reaches into the engine: mailboxes, the supervisor, the block pool.

The engine's own classes run; only their doors are watched. A tap may note what passes, hold it up, or let the actor
that comes to the door crash or be cancelled there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.supervise import Child, Supervisor


class Watcher(Protocol):
    def capacity(self, name: str, capacity: int) -> int: ...
    def delay(self, box: Mailbox[Any, Any], message: Any, *, control: bool) -> float: ...
    def send_later(
        self, box: Mailbox[Any, Any], call: Callable[[], object], seconds: float, *, control: bool = False
    ) -> bool: ...
    def sent(self, box: Mailbox[Any, Any], message: Any) -> None: ...
    def before_next(self, box: Mailbox[Any, Any]) -> None: ...
    def taken(self, box: Mailbox[Any, Any], message: Any) -> None: ...
    def wakes(self, box: Mailbox[Any, Any]) -> bool: ...
    def reliably(self) -> AbstractContextManager[None]: ...
    def idle(self, box: Mailbox[Any, Any]) -> None: ...
    def born(self, name: str, actor: Any, scope: anyio.CancelScope) -> None: ...
    def crashed(self, name: str, error: Exception) -> None: ...
    def left(self, name: str) -> None: ...
    def labelled(self, pool: BlockPool, block: int, key: bytes) -> None: ...


class _Watched:
    """An actor in a scope of its own, which may be cancelled alone."""

    def __init__(self, name: str, actor: Any, watcher: Watcher) -> None:
        self._name = name
        self._actor = actor
        self._watcher = watcher

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as scope:
            self._watcher.born(self._name, self._actor, scope)
            try:
                await self._actor.run(task_status=task_status)
            except Exception as error:
                self._watcher.crashed(self._name, error)
                raise
        self._watcher.left(self._name)


@contextmanager
def observed(watcher: Watcher) -> Iterator[None]:
    """Every mailbox, supervisor and pool that is made or used inside tells the watcher."""
    changes = [
        *((Mailbox, name, change(getattr(Mailbox, name), watcher)) for name, change in _MAILBOX.items()),
        (Supervisor, "__init__", _supervisor_init(Supervisor.__init__, watcher)),
        (BlockPool, "cache_block", _cache_block(BlockPool.cache_block, watcher)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, function in changes:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def _mailbox_init(original: Any, watcher: Watcher) -> Any:
    def init(self: Any, name: str, capacity: int, **options: Any) -> None:
        original(self, name, watcher.capacity(name, capacity), **options)

    return init


def _put(original: Any, watcher: Watcher) -> Any:
    async def put(self: Any, message: Any) -> None:
        seconds = watcher.delay(self, message, control=False)
        if seconds:
            await anyio.sleep(seconds)
        await original(self, message)
        watcher.sent(self, message)

    return put


def _offer(original: Any, watcher: Watcher) -> Any:
    def offer(self: Any, message: Any) -> bool:
        def deliver() -> bool:
            accepted: bool = original(self, message)
            if accepted:
                watcher.sent(self, message)
            return accepted

        seconds = watcher.delay(self, message, control=False) if not self.closed else 0.0
        return watcher.send_later(self, deliver, seconds) or deliver()

    return offer


def _control(original: Any, watcher: Watcher) -> Any:
    def control(self: Any, message: Any) -> None:
        def deliver() -> None:
            original(self, message)
            watcher.sent(self, message)

        seconds = watcher.delay(self, message, control=True)
        if not watcher.send_later(self, deliver, seconds, control=True):
            deliver()

    return control


def _take(original: Any, watcher: Watcher) -> Any:
    def take(self: Any) -> Any:
        watcher.before_next(self)
        message = original(self)
        if message is not None:
            watcher.taken(self, message)
        return message

    return take


def _wait(original: Any, watcher: Watcher) -> Any:
    async def wait(self: Any, timeout: float | None = None) -> bool:
        watcher.before_next(self)
        watcher.idle(self)
        woken: bool = await original(self, timeout)
        return woken

    return wait


def _supervisor_init(original: Any, watcher: Watcher) -> Any:
    def init(self: Any, children: Any, *args: Any, **options: Any) -> None:
        original(self, [_watched(child, watcher) for child in children], *args, **options)

    return init


def _watched(child: Child, watcher: Watcher) -> Child:
    return msgspec.structs.replace(child, build=lambda: _Watched(child.name, child.build(), watcher))


def _cache_block(original: Any, watcher: Watcher) -> Any:
    def label(self: Any, block: int, key: bytes, *args: Any, **options: Any) -> Any:
        watcher.labelled(self, block, key)
        return original(self, block, key, *args, **options)

    return label


def _wake_consumer(original: Any, watcher: Watcher) -> Any:
    def wake_consumer(self: Any) -> None:
        if self._consumer is None or watcher.wakes(self):
            original(self)

    return wake_consumer


def _nudge(original: Any, watcher: Watcher) -> Any:
    def nudge(self: Any) -> None:
        with watcher.reliably():
            original(self)

    return nudge


_MAILBOX = {
    "__init__": _mailbox_init,
    "put": _put,
    "offer": _offer,
    "control": _control,
    "take": _take,
    "wait": _wait,
    "nudge": _nudge,
    "_wake_consumer": _wake_consumer,
}
