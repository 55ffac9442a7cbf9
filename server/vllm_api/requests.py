"""The requests of an engine in a thread of its own, each with an answer that grows until it is asked for.

Everything here runs on the engine's event loop. Memory is bounded by the answers themselves: the pieces of one request
are joined as they come, however seldom they are asked for.
"""

from collections.abc import Callable
from typing import Any

import anyio

from troupellm.actors.admission.prompts import PromptLike
from troupellm.actors.client.stream import Stream
from troupellm.actors.engine.engine import Engine
from troupellm.actors.llm.growing_answer import GrowingAnswer
from troupellm.actors.llm.lora_request import lora_requests, serve
from troupellm.actors.llm.outputs import RequestOutput, request_output
from troupellm.actors.llm.pooling_outputs import PoolingOutput, PoolingRequestOutput
from troupellm.protocol.errors import InvalidRequest, TroupeError
from troupellm.protocol.params.output_kind import RequestOutputKind
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams

Output = RequestOutput | PoolingRequestOutput


class OpenRequest:
    """One request, from its acceptance to its last output."""

    def __init__(self, request_id: str, on_news: Callable[["OpenRequest"], None]) -> None:
        self.request_id = request_id
        self.error: TroupeError | None = None
        self.finished = False
        self._on_news = on_news
        self._news = anyio.Event()
        self._stream: Stream | None = None
        self._answer: GrowingAnswer | None = None
        self._final: Output | None = None
        self._scope = anyio.CancelScope()

    async def open(self, engine: Engine, prompt: PromptLike, params: SamplingParams, **options: Any) -> None:
        """Hand it over; returns when it is found valid.

        Raises:
            TroupeError: it was refused.
        """
        whole = params.selects is not None or params.output_kind is RequestOutputKind.FINAL_ONLY
        self._stream = engine.stream(prompt, params, request_id=self.request_id, streaming=not whole, **options)
        self._answer = None if whole else GrowingAnswer(self._stream, params.output_kind)
        try:
            await self._stream.opened()
        except BaseException:
            await self._stream.cancel()
            raise

    async def run(self) -> None:
        """Read the answer to its end."""
        assert self._stream is not None, "a request that was opened"
        try:
            with self._scope:
                async with self._stream as stream:
                    if self._answer is None:
                        self._final = request_output(await stream.collect())
                    else:
                        await self._read(stream, self._answer)
        except TroupeError as error:
            self.error = error
        self._end()

    async def pool(self, engine: Engine, prompt: PromptLike, params: PoolingParams, **options: Any) -> None:
        """Pool a prompt."""
        try:
            with self._scope:
                async for _, pooled in engine.pool([prompt], params, **options):
                    self._final = PoolingRequestOutput(
                        request_id=self.request_id,
                        outputs=PoolingOutput(pooled.values),
                        prompt_token_ids=list(pooled.prompt_token_ids),
                        num_cached_tokens=pooled.usage.cached_tokens,
                    )
        except TroupeError as error:
            self.error = error
        self._end()

    def take(self) -> Output | None:
        """The output that is to be given now; None of a request that was ended.

        Raises:
            TroupeError: the request failed.
        """
        self._news = anyio.Event()
        if self.error is not None:
            raise self.error
        if self._final is not None or self._answer is None:
            return self._final
        return self._answer.output(finished=self.finished)

    async def wait(self) -> None:
        """Return when there is an output to take."""
        await self._news.wait()

    async def cancel(self) -> None:
        """End it. Idempotent."""
        self._scope.cancel()
        if self._stream is not None:
            await self._stream.cancel()

    async def _read(self, stream: Stream, answer: GrowingAnswer) -> None:
        while (deltas := await stream.wake()) is not None:
            answer.add(deltas)
            if not stream.finished:
                self._report()

    def _end(self) -> None:
        self.finished = True
        self._report()

    def _report(self) -> None:
        self._news.set()
        self._on_news(self)


class OpenRequests:
    """The requests of one engine by their names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, OpenRequest] = {}
        self._with_news: dict[str, OpenRequest] = {}
        self._news = anyio.Event()

    def __len__(self) -> int:
        return len(self._open)

    async def add(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        lora_request: object = None,
        **options: Any,
    ) -> tuple[OpenRequest, Callable[[], Any]]:
        """Take a request. The caller starts the second value as a task on the engine's loop.

        Raises:
            InvalidRequest: the name is taken, or the request or its adapter cannot be served.
        """
        (adapter,) = lora_requests(lora_request, 1)
        if adapter is not None:
            options["adapter"] = await serve(self._engine, adapter)
        if request_id in self._open:
            raise InvalidRequest(f"request_id {request_id} is taken by a request that runs", param="request_id")
        request = OpenRequest(request_id, self._has_news)
        self._open[request_id] = request
        if isinstance(params, PoolingParams):
            return request, lambda: request.pool(self._engine, prompt, params, **options)
        try:
            await request.open(self._engine, prompt, params, **options)
        except BaseException:
            self._open.pop(request_id, None)
            raise
        return request, request.run

    async def step(self) -> list[Output]:
        """Wait for news, and give the outputs of all requests that have some; an empty list where no request is open.

        Raises:
            TroupeError: a request failed; it is not open any more, and the outputs of others come with the next step.
        """
        while self._open and not self._with_news:
            self._news = anyio.Event()
            await self._news.wait()
        outputs: list[Output] = []
        for request_id, request in list(self._with_news.items()):
            if outputs and request.error is not None:
                break
            del self._with_news[request_id]
            if request.finished:
                self._open.pop(request_id, None)
            output = request.take()
            if output is not None:
                outputs.append(output)
        return outputs

    async def next_of(self, request: OpenRequest) -> Output | None:
        """The next output of one request; None after its last.

        Raises:
            TroupeError: the request failed.
        """
        if self._open.get(request.request_id) is not request:
            return None
        await request.wait()
        self._with_news.pop(request.request_id, None)
        if request.finished:
            self._open.pop(request.request_id, None)
        return request.take()

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown names are no error."""
        for request_id in request_ids:
            request = self._open.pop(request_id, None)
            self._with_news.pop(request_id, None)
            if request is not None:
                await request.cancel()
        self._news.set()

    def _has_news(self, request: OpenRequest) -> None:
        if self._open.get(request.request_id) is request:
            self._with_news[request.request_id] = request
            self._news.set()
