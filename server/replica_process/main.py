"""An engine process of a fleet: one engine, and its requests at the other end of a socket pair.

The fleet starts it with one end of the pair. It ends when told to, with the other end of the pair, with its parent's
death, and when its engine has failed.
"""

import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.abc

from troupellm.actors.engine.api_process_session import ApiProcessSession
from troupellm.actors.engine.engine import Engine
from troupellm.actors.runtime.link import Link, PeerGone
from troupellm.models.worker.memory_use import return_large_blocks
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.protocol.wire.api_process import (
    Abort,
    AdminAnswer,
    Apply,
    AskAdmin,
    AskCharge,
    AskMetrics,
    CancelAdmin,
    CorrectCharge,
    Loading,
    MetricsText,
    PauseReader,
    ResumeReader,
    Status,
    Submit,
    WireError,
)
from troupellm.protocol.wire.replica import FromReplica, ReplicaFailed, StartReplica, StopReplica, ToReplica
from troupellm.server.base.errors import flatten
from troupellm.server.base.exit_codes import EXIT_FAILED, EXIT_OK
from troupellm.server.host.admin_actions import AdminActions
from troupellm.server.observe.process_life import live, run_child

logger = logging.getLogger("troupellm.server")

REPORT_SECONDS = 0.25
PART_SECONDS = 0.25
"""An answer that is not streamed loses the tokens of so many seconds when its replica dies."""


class ReplicaProcess:
    """From its configuration to its end."""

    def __init__(
        self, link: Link[FromReplica, ToReplica], start: StartReplica, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._on_ready = on_ready
        self._link = link
        self._engine = Engine(config=start.config, progress=self._report_progress)
        self._actions = AdminActions(start.server, lambda: self._engine)
        self._session: ApiProcessSession | None = None
        self._asked: dict[int, anyio.CancelScope] = {}
        """Around what admin routes have asked for."""

    async def run(self) -> int:
        """Until told to end (0), until the fleet is gone or the engine has failed (1)."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._report)
            try:
                code = await self._serve()
            except Exception as error:
                cause = flatten(error)
                if not isinstance(cause, TroupeError):
                    raise
                logger.error("the model cannot be served: %s", cause)
                self._link.post(ReplicaFailed(WireError.of(cause)))
                code = EXIT_FAILED
            group.cancel_scope.cancel()
        return code

    async def _serve(self) -> int:
        codes: list[int] = []
        async with anyio.create_task_group() as loading:

            async def listen() -> None:
                """Ends the process on order, also while the model is loading."""
                codes.append(await self._listen(loading))
                loading.cancel_scope.cancel()

            loading.start_soon(listen)
            async with self._engine as engine:
                session = self._session = engine.api_process_session(self._link.post, self._link.drained, PART_SECONDS)
                self._link.post(self._status())
                self._link.post(engine.serving())
                self._on_ready()
                async with anyio.create_task_group() as group:
                    group.start_soon(session.run)
                    await engine.wait_failed()
                    codes.append(EXIT_FAILED)
                    group.cancel_scope.cancel()
            loading.cancel_scope.cancel()
        return codes[0] if codes else EXIT_FAILED

    async def _listen(self, group: anyio.abc.TaskGroup) -> int:
        while True:
            try:
                message = await self._link.receive()
            except PeerGone:
                return EXIT_FAILED
            match message:
                case StopReplica():
                    return EXIT_OK
                case Apply() | Submit() | Abort() | PauseReader() | ResumeReader() | AskCharge() | CorrectCharge():
                    assert self._session is not None, "a fleet sends nothing before the engine is there"
                    self._session.handle(message)
                case AskMetrics(query=query, compat=compat):
                    try:
                        text = self._engine.metrics_text(compat=compat)
                    except TroupeError:  # it is closing
                        text = b""
                    self._link.post(MetricsText(query, text))
                case AskAdmin(query=query):
                    self._asked[query] = anyio.CancelScope()  # now: the very next message may take it back
                    group.start_soon(self._administer, message)
                case CancelAdmin(query=query):
                    if query in self._asked:
                        self._asked[query].cancel()
                case _:
                    raise AssertionError(f"a fleet does not say {message}")

    async def _administer(self, asked: AskAdmin) -> None:
        answer: Any = None
        with self._asked[asked.query]:
            try:
                body = await self._actions.act(asked.action, asked.arguments)
                answer = AdminAnswer(query=asked.query, body=body)
            except TroupeError as error:
                answer = AdminAnswer(query=asked.query, error=WireError.of(error))
        del self._asked[asked.query]
        if answer is not None:
            self._link.post(answer)

    def _report_progress(self, progress: LoadProgress) -> None:
        self._link.post(Loading(progress))

    def _status(self) -> Status:
        return Status(snapshot=self._engine.snapshot(), draining=False, in_flight_elsewhere=0)

    async def _report(self) -> None:
        while True:
            await self._link.drained()
            self._link.post(self._status())
            await anyio.sleep(REPORT_SECONDS)


async def serve(fleet: socket.socket) -> int:
    """An engine process, for the fleet at the other end of a socket pair."""
    return_large_blocks()

    async def run(link: Link[FromReplica, ToReplica], start: StartReplica) -> int:
        return await ReplicaProcess(link, start, _freeze).run()

    return await live("engine process", fleet, ToReplica, StartReplica, run)


def _freeze() -> None:
    """Loaded objects stay: full collections need not walk them."""
    gc.collect()
    gc.freeze()


def main(argv: Sequence[str] | None = None) -> int:
    sockets = {"fleet": "descriptor of the socket to the fleet's process"}
    return run_child("troupellm-replica", sockets, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
