"""`AsyncLLMEngine`: an engine whose answers are iterated over, with vLLM's names.

Programs that are not bound to these names are better off with `Engine`, which lives in the caller's own event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from troupellm.actors.admission.prompts import PromptLike
from troupellm.actors.llm.outputs import RequestOutput
from troupellm.actors.llm.pooling_outputs import PoolingRequestOutput
from troupellm.actors.llm.script_tokenizer import ScriptTokenizer
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.server.vllm_api.engine_base import ThreadedEngine, settled
from troupellm.server.vllm_api.requests import Output

T = TypeVar("T")


class AsyncLLMEngine(ThreadedEngine):
    """Usable from any asyncio event loop. The engine lives in a thread of its own and is loaded when this is made."""

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: object = None,
        trace_headers: object = None,
        priority: int = 0,
        **_: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as `sampling_params.output_kind` says. Leaving the iteration ends the request.

        Raises:
            TroupeError: the request was refused, or failed.
        """
        params = settled(sampling_params, priority)
        async with aclosing(self._outputs(request_id, prompt, params, lora_request)) as outputs:
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                yield output

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: object = None,
        trace_headers: object = None,
        priority: int = 0,
        **_: object,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The one output of a prompt that is pooled.

        Raises:
            TroupeError: the request was refused, or failed.
        """
        params = settled(pooling_params, priority)
        async with aclosing(self._outputs(request_id, prompt, params, lora_request)) as outputs:
            async for output in outputs:
                assert isinstance(output, PoolingRequestOutput)
                yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their iterations end. Unknown names are no error."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._there(self._requests.abort, names)

    async def get_tokenizer(self, *_: object) -> ScriptTokenizer:
        """The model's tokenizer and chat template with the names of transformers."""
        return self._tokenizer

    async def reset_prefix_cache(self, *_: object, **__: object) -> bool:
        """Forget the keys and values of all prompts and answers so far."""
        return await self._there(self.engine.reset_prefix_cache)

    async def check_health(self) -> None:
        """
        Raises:
            EngineStopped: the engine has failed, or was shut down.
        """
        if self.errored:
            raise EngineStopped("the engine has failed or was shut down", code="stopped")

    async def do_log_stats(self) -> None:
        """Changes nothing: an engine without a server writes no statistics line."""

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def errored(self) -> bool:
        return not self._finalizer.alive or self.engine.state not in ("ready", "draining")

    def shutdown_background_loop(self) -> None:
        """As `shutdown`."""
        self.shutdown()

    async def _outputs(
        self, request_id: str, prompt: PromptLike, params: SamplingParams | PoolingParams, lora_request: object
    ) -> AsyncGenerator[Output, None]:
        portal = self._running.portal
        request, work = await self._there(self._requests.add, request_id, prompt, params, lora_request)
        portal.start_task_soon(work)
        ended = False
        try:
            while (output := await self._there(self._requests.next_of, request)) is not None:
                ended = output.finished
                yield output
                if ended:
                    return
            ended = True
        finally:
            if not ended and self._finalizer.alive:
                aborted = portal.start_task_soon(self._requests.abort, [request_id])
                await asyncio.shield(asyncio.wrap_future(aborted))

    async def _there(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Have it done on the engine's event loop."""
        return await asyncio.wrap_future(self._running.portal.start_task_soon(work, *args))


AsyncLLM = AsyncLLMEngine
"""vLLM's newer name."""
