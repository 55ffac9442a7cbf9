"""A thread with an event loop in which one engine lives, for callers that block."""

import os
from contextlib import AbstractContextManager

from anyio.from_thread import BlockingPortal, start_blocking_portal

from troupellm.actors.engine.engine import Engine
from troupellm.actors.runtime.ports import ExitWatch
from troupellm.protocol.errors import WrongEventLoop


class EngineThread:
    """An engine with its thread and event loop. The thread holds no reference to its owner, which can be collected.

    Raises:
        ModelLoadError: the model cannot be served.
    """

    def __init__(self, engine: Engine) -> None:
        self._closed = False
        self._pid = os.getpid()
        self._portal_scope: AbstractContextManager[BlockingPortal] = start_blocking_portal("asyncio")
        self.portal = self._portal_scope.__enter__()
        try:
            self._engine_scope: AbstractContextManager[Engine] = self.portal.wrap_async_context_manager(engine)
            self._engine_scope.__enter__()
        except BaseException as error:  # an interrupt finds the engine loading, which must be told
            self._portal_scope.__exit__(type(error), error, error.__traceback__)
            raise
        self.watch = ExitWatch(self.close)

    def check(self) -> None:
        """
        Raises:
            WrongEventLoop: this process is a fork of the one with the engine, and has none of its threads.
        """
        if os.getpid() != self._pid:
            raise WrongEventLoop("the engine lives in the parent process; after a fork a process needs its own")

    def close(self) -> None:
        """After a fork the child closes nothing: thread and engine are its parent's."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.watch.stop()
        try:
            self._engine_scope.__exit__(None, None, None)
        finally:
            self._portal_scope.__exit__(None, None, None)
