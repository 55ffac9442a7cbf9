"""A request as its caller sees it: an async context manager that iterates over deltas.

Leaving the block, for any reason, ends the request. A stream that was iterated without a block and dropped is
ended by its finaliser, with a ResourceWarning.
"""

import warnings
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio

from troupellm.actors.client.chat_reading import read_completion
from troupellm.actors.client.choices import gather_choices
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.protocol.errors import RequestAborted
from troupellm.protocol.params.outputs import (
    Completion,
    Delta,
    FinishReason,
    Pooled,
    Timing,
    TokenLogprob,
    Usage,
)
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.quota import Quota

if TYPE_CHECKING:
    from troupellm.actors.client.chat_turn import ChatTurn

T = TypeVar("T")

ABORT_DEADLINE_SECONDS = 5.0
_FIRST_REPEAT_SECONDS = 0.02


class Stream:
    """Deltas of one request. Made by `Engine.stream` and `Engine.chat`.

    `usage`, `timing`, `finish_reasons` and `prompt_logprobs` are complete when the iteration has ended.
    """

    def __init__(
        self,
        request_id: str,
        start: Callable[[], Awaitable[LocalOutbox]],
        post: Callable[[Callable[[], None]], None],
        *,
        prompt: str | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._params = params
        self.is_chat = False
        """Its choices get messages, which `chat_parser` tells apart from the text."""
        self.chat_parser: ChatParser | None = None
        self.finish_reasons: dict[int, FinishReason] = {}
        self._start = start
        self._post = post
        self._outbox: LocalOutbox | None = None
        self._entry = anyio.Lock(fast_acquire=True)
        self._entering: anyio.CancelScope | None = None
        self._left = False
        self._failure: Exception | None = None
        """The exception that a reader raised when it was given pieces at once."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Empty until the request was opened."""
        return (self._outbox.prompt_token_ids if self._outbox else None) or ()

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        return self._outbox.logprobs_of_prompt if self._outbox else None

    @property
    def usage(self) -> Usage | None:
        return self._outbox.usage if self._outbox else None

    @property
    def quota(self) -> Quota | None:
        """The remaining limits of its tenant when it was admitted; None where the tenant has none."""
        return self._outbox.quota if self._outbox else None

    @property
    def timing(self) -> Timing:
        return self._outbox.timing if self._outbox else Timing()

    @property
    def finished(self) -> bool:
        """The request is over in the engine; pieces may still wait to be read."""
        return self._outbox is not None and self._outbox.terminal

    async def __aenter__(self) -> Self:
        """Take a place in the engine and hand the request over.

        Raises:
            EngineOverloaded: no place, and the caller did not want to wait for one.
            EngineStopped: the engine takes no requests.
        """
        await self._entered()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next piece.

        Raises:
            TroupeError: the request failed; raised once everything that came before was read.
        """
        delta = await self._next(LocalOutbox.take)
        if delta is None:
            raise StopAsyncIteration
        if delta.finish_reason is not None:
            self.finish_reasons[delta.index] = delta.finish_reason
        return delta

    def wake(self) -> Awaitable[list[Delta] | None]:
        """All pieces that wait to be read, at most one per sequence, once there are any; None at the end.

        Raises:
            TroupeError: the request failed; raised once everything that came before was read.
        """
        return self._next(self._taken)

    def at_once(self, take: Callable[[list[Delta]], None], ready: Callable[[], bool]) -> None:
        """Give pieces to `take` as they come while `ready` returns True, and otherwise wake the task that waits in
        `wake`, which costs as much again as a send. Pieces that end a sequence always come by `wake`.

        Neither call may wait. Their exceptions are raised by `wake`. The stream must be open.
        """
        outbox = self._outbox
        assert outbox is not None, "a stream that is opened"

        def taken() -> bool:
            try:
                if not outbox.can_write_directly or not ready():
                    return False
                take(outbox.take_all())
            except Exception as error:  # theirs, and not the output actor's, which calls this
                self._failure = error
                outbox.set_sink(None)
                return False
            return True

        outbox.set_sink(taken)

    def take_ready(self) -> list[Delta]:
        """The pieces that wait to be read, at most one per sequence, without waiting for more.

        The end of the stream, an error too, comes with the next iteration.
        """
        return [] if self._outbox is None or self._left else self._taken(self._outbox)

    def _taken(self, outbox: LocalOutbox) -> list[Delta]:
        ready = outbox.take_all()
        for delta in ready:
            if delta.finish_reason is not None:
                self.finish_reasons[delta.index] = delta.finish_reason
        return ready

    async def _next(self, take: Callable[[LocalOutbox], T | None]) -> T | None:
        """The result of `take` once pieces wait; None at the end."""
        if self._left:
            return None
        outbox = self._outbox or await self._entered()
        while not self._left:
            if self._failure is not None:
                self._left = True
                raise self._failure
            if taken := take(outbox):
                return taken
            if outbox.terminal:
                if outbox.error is not None:
                    self._left = True
                    raise outbox.error
                return None
            await outbox.wait()
        return None

    def turn(self) -> "ChatTurn":
        """The same answers as parsed pieces: content, reasoning, tool calls. Instead of iterating over deltas."""
        from troupellm.actors.client.chat_turn import ChatTurn

        return ChatTurn(self, 1 if self._params is None else self._params.n, self.chat_parser)

    async def opened(self) -> None:
        """Return once the request is validated and queued.

        Raises:
            TroupeError: it was refused.
        """
        outbox = await self._entered()
        while outbox.prompt_token_ids is None and not outbox.terminal:
            await outbox.wait()
        if outbox.error is not None:
            raise outbox.error

    def abort(self) -> None:
        """End the request without waiting for the engine to let go of it. Idempotent."""
        self._left = True
        if self._entering is not None:
            self._entering.cancel()
        if self._outbox is not None and not (self._outbox.terminal and self._outbox.cancelled):
            self._outbox.abort()

    async def cancel(self) -> None:
        """End the request, also while it is being handed over. Idempotent.

        Returns when the engine has let go of it, or after `ABORT_DEADLINE_SECONDS`; being cancelled does not cut that
        short. Pieces that were not read are dropped.
        """
        self.abort()
        pause = _FIRST_REPEAT_SECONDS
        with anyio.CancelScope(shield=True), anyio.move_on_after(ABORT_DEADLINE_SECONDS):
            if self._entry.locked():
                async with self._entry:
                    pass
            while (outbox := self._outbox) is not None and not outbox.terminal:
                # Repeated: an abort that overtakes its own request on the way to the scheduler is lost.
                if not await outbox.wait(pause):
                    outbox.abort()
                    pause *= 2

    async def when_terminal(self, call: Callable[[], None]) -> None:
        """Hand the request over, and have `call` called once it is over."""
        (await self._entered()).when_terminal(call)

    async def collect(self) -> Completion:
        """Read to the end and give the whole answer.

        Raises:
            TroupeError: the request failed.
        """
        texts: dict[int, list[Delta]] = {}
        async for delta in self:
            texts.setdefault(delta.index, []).append(delta)
        if self.usage is None:
            raise RequestAborted("the request was ended before its answer was complete")
        completion = Completion(
            request_id=self.request_id,
            choices=gather_choices(texts, self._params),
            usage=self.usage,
            timing=self.timing,
            prompt_token_ids=self.prompt_token_ids,
            prompt=self.prompt,
            prompt_logprobs=self.prompt_logprobs,
        )
        return await read_completion(completion, self.chat_parser) if self.is_chat else completion

    async def collect_pooled(self) -> Pooled:
        """Wait for the vector of a request that is pooled.

        Raises:
            TroupeError: the request failed.
        """
        async for _ in self:
            raise AssertionError("a pooled request has no pieces")
        if self.usage is None or self._outbox is None or self._outbox.vector is None:
            raise RequestAborted("the request was ended before its answer was complete")
        return Pooled(
            request_id=self.request_id,
            vector=self._outbox.vector,
            usage=self.usage,
            timing=self.timing,
            prompt_token_ids=self.prompt_token_ids,
            quota=self.quota,
        )

    async def _entered(self) -> LocalOutbox:
        """The outbox of the request, which the first to come hands over."""
        if self._outbox is not None:
            return self._outbox
        async with self._entry:
            if self._outbox is None and not self._left:
                with anyio.CancelScope() as self._entering:
                    self._outbox = await self._start()
                self._entering = None
            if self._outbox is None or self._left:
                self.abort()  # it may have been handed over all the same
                raise RequestAborted("the request was ended before it began")
            return self._outbox

    def __del__(self) -> None:
        outbox: LocalOutbox | None = getattr(self, "_outbox", None)
        if outbox is not None and not outbox.terminal and not outbox.cancelled:
            self._post(outbox.abort)
            warnings.warn(
                f"stream {self.request_id} was dropped before its end; use `async with`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
