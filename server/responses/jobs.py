"""Responses that are generated in the background: each is a task of its own, which no client holds up by leaving.

Owns:      the tasks of one process, under the app's `Background`, by the ids of their responses.
On crash:  of the process: a response counts as failed once its lease has run out.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import msgspec

from troupellm.protocol.api.response_events import ResponseEvent
from troupellm.protocol.api.response_objects import ResponseObject
from troupellm.protocol.errors import InvalidRequest, RequestFailed, TroupeError
from troupellm.server.base.errors import ClientGone, HttpError, flatten, not_ready
from troupellm.server.base.exchange import Exchange, Message
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import ServedTurn, open_turn
from troupellm.server.responses.builder import ResponseBuilder, encoded
from troupellm.server.responses.generate import failure, joined, stored_form
from troupellm.server.responses.prepare import Plan
from troupellm.server.storage.responses_rows import LEASE_SECONDS, failed_body

logger = logging.getLogger("troupellm.server")

RENEW_SECONDS = LEASE_SECONDS / 10
"""How often a job says that it lives, and looks whether another process has cancelled it."""
_ENDED = "the server was shut down before this response was complete"


class Jobs:
    def __init__(self, host: ServerState) -> None:
        self._host = host
        self._jobs: dict[str, Job] = {}

    def find(self, name: str) -> "Job | None":
        """A job that runs in this process."""
        return self._jobs.get(name)

    async def start(self, exchange: Exchange, plan: Plan) -> ResponseObject:
        """Returns once the engine has let the request in and the response is kept.

        Raises:
            TroupeError: it was refused; nothing is left of it then.
        """
        job = self._jobs[plan.frame.id] = Job(self._host, _detached(exchange), plan)

        async def run() -> None:
            try:
                await job.run()
            finally:
                del self._jobs[plan.frame.id]
                job.ended.set()
                job.changed()

        try:
            self._host.background.start(run, "background", exchange.key)
        except TroupeError:
            del self._jobs[plan.frame.id]
            raise
        try:
            await job.admitted.wait()
        except BaseException:  # no client knows its id
            job.cancel()
            raise
        if job.refusal is not None:
            raise job.refusal
        exchange.quota = job.exchange.quota
        return plan.frame


class Job:
    def __init__(self, host: ServerState, exchange: Exchange, plan: Plan) -> None:
        self.exchange = exchange
        self.admitted = anyio.Event()
        """It runs, or was refused."""
        self.refusal: Exception | None = None
        self.ended = anyio.Event()
        self.news = anyio.Event()
        """Set, and replaced by another one, whenever something was written of it."""
        self._host = host
        self._store = host.responses
        self._plan = plan
        self._name = plan.frame.id
        self._finished = False
        self._failure: TroupeError | None = None

    def cancel(self) -> None:
        self.exchange.cancel_scope.cancel()

    def changed(self) -> None:
        self.news.set()
        self.news = anyio.Event()

    async def run(self) -> None:
        self._host.enter(self.exchange)
        try:
            with self.exchange.cancel_scope:
                await self._generate()
        finally:
            self._host.leave(self.exchange)
            if not self.admitted.is_set():
                self.refusal = self.refusal or not_ready("the server is shutting down", code="draining")
                self.admitted.set()
            elif not self._finished:
                with anyio.CancelScope(shield=True), suppress(TroupeError):
                    why = _ENDED if self._failure is None else self._failure.message
                    body = failed_body(msgspec.json.encode(self._plan.frame), why)
                    await self._store.update(self._plan.owner, self._name, "failed", body)

    async def _generate(self) -> None:
        plan = self._plan
        try:
            async with (
                open_turn(self._host, self.exchange, plan.chat, streaming=True, request_id=self._name) as turn,
                anyio.create_task_group() as group,
            ):
                await turn.opened()
                await self._begin()
                self.admitted.set()
                group.start_soon(self._watch)
                await self._follow(turn)
                group.cancel_scope.cancel()
        except (Exception, BaseExceptionGroup) as error:
            cause = flatten(error)
            if self.admitted.is_set():
                if not isinstance(cause, TroupeError):
                    self._failure = RequestFailed("internal error", code="internal_error")
                    raise
                self._failure = cause
                logger.warning("background response %s has failed: %s", self._name, cause.message)
                return
            self.refusal = cause if isinstance(cause, Exception) else RuntimeError("no exception")

    async def _begin(self) -> None:
        """Keep it, before anybody hears of it.

        Raises:
            InvalidRequest: it is larger than all that may be kept.
            HttpError: 503, it cannot be kept now.
        """
        stored = stored_form(self._plan, self._plan.frame)
        if not self._store.fits(stored):
            message = "background: the response is larger than all that are kept may be (--responses-store-bytes)"
            raise InvalidRequest(message, param="background", code="request_too_large")
        if not await self._store.put(self._plan.owner, stored):
            raise not_ready("there is no room to keep the response now", code="server_is_overloaded")

    async def _follow(self, turn: ServedTurn) -> None:
        """From the turn to the store."""
        builder = ResponseBuilder(self._plan.frame, self._plan.namespaced, sealing=self._plan.sealing)
        await self._write(builder.begin(), builder.response)
        try:
            async for pieces in turn:
                await self._log(builder.feed(pieces))
            out = builder.finish(turn.usage, self._host.now())
        except ClientGone:
            raise
        except (Exception, BaseExceptionGroup) as error:
            out = failure(builder, self._plan, error)
        response = await joined(self._host, self.exchange, self._plan, builder.response)
        out[-1] = msgspec.structs.replace(out[-1], response=response)
        await self._write(out, response)
        self._finished = True

    async def _write(self, out: list[ResponseEvent], response: ResponseObject) -> None:
        """Log events first: who reads that a response has ended finds all of them."""
        await self._log(out)
        owner = self._plan.owner
        body = msgspec.json.encode(response)
        await self._patiently(lambda: self._store.update(owner, self._name, response.status, body))
        self.changed()

    async def _log(self, out: list[ResponseEvent]) -> None:
        if out and self._plan.streaming:
            events = encoded(out)
            await self._patiently(lambda: self._store.log(self._name, out[0].sequence_number, events))
            self.changed()

    async def _patiently(self, write: Callable[[], Awaitable[object]]) -> None:
        """Write to a store that another process may hold for a while; the answer waits, and is not lost.

        Raises:
            HttpError: 503, it could not be written for as long as the lease lasts.
        """
        until = anyio.current_time() + LEASE_SECONDS
        while True:
            try:
                await write()
                return
            except HttpError:
                if anyio.current_time() + RENEW_SECONDS > until:
                    raise
            await anyio.sleep(RENEW_SECONDS)

    async def _watch(self) -> None:
        """End it when another process has cancelled or deleted it.

        That the store cannot be asked is not its end: if that lasts, the lease runs out, and the next answer says so.
        """
        runs = True
        while runs:
            await anyio.sleep(RENEW_SECONDS)
            with suppress(HttpError):
                runs = await self._store.renew(self._name)
        self.cancel()


def _detached(exchange: Exchange) -> Exchange:
    """An exchange of the same key that no client is on the other end of."""

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        pass

    scope = {"method": exchange.method, "path": "/", "raw_path": exchange.raw_path, "headers": exchange.headers}
    detached = Exchange(scope, receive, send, request_id=exchange.request_id, write_timeout=0.0)
    detached.caller, detached.route = exchange.caller, exchange.route
    return detached
