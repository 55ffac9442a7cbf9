"""`LLMEngine`: an engine that is driven step by step, with vLLM's names."""

from collections.abc import Iterable
from typing import Any

from troupellm.actors.admission.prompts import PromptLike
from troupellm.actors.llm.script_tokenizer import ScriptTokenizer
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.server.vllm_api.engine_base import ThreadedEngine, settled
from troupellm.server.vllm_api.requests import Output


class LLMEngine(ThreadedEngine):
    """Blocking. The engine computes in a thread of its own, also between two calls of `step`."""

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: object = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: object = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Take a request; returns its name. The arrival time is always that of the call.

        Raises:
            InvalidRequest: the name is taken, or the request cannot be served.
        """
        settings = settled(params, priority)
        _, work = self._wait_for(self._requests.add, request_id, prompt, settings, lora_request)
        self._running.portal.start_task_soon(work)
        return request_id

    def step(self) -> list[Output]:
        """Wait until a request has news, and give the output of each that has; an empty list where no request is open.

        Raises:
            TroupeError: a request failed; the others go on.
        """
        return self._wait_for(self._requests.step)

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests, which have no further outputs. Unknown names are no error."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._wait_for(self._requests.abort, names)

    def has_unfinished_requests(self) -> bool:
        """Whether a request has outputs to come."""
        return self.get_num_unfinished_requests() > 0

    def get_tokenizer(self) -> ScriptTokenizer:
        """The model's tokenizer and chat template with the names of transformers."""
        return self._tokenizer

    def reset_prefix_cache(self, *_: object, **__: object) -> bool:
        """Forget the keys and values of all prompts and answers so far."""
        return self._wait_for(self.engine.reset_prefix_cache)

    def do_log_stats(self) -> None:
        """Changes nothing: an engine without a server writes no statistics line."""
