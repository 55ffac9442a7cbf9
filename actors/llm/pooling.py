"""The part of `LLM` that pools: embeddings, classes and scores with vLLM's names."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from troupellm.actors.admission.prompts import PromptLike, as_prompt
from troupellm.actors.client.pooling import Scored
from troupellm.actors.engine.engine import Engine
from troupellm.actors.llm.lora_request import LoRARequest, lora_requests, serve
from troupellm.actors.llm.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from troupellm.actors.llm.progress_bar import Bar
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokensPrompt, Truncation
from troupellm.protocol.params.outputs import Pooled
from troupellm.protocol.params.pooling import PoolingParams, PoolingTask

AnswerT = TypeVar("AnswerT")
OutputT = TypeVar("OutputT", bound=PoolingRequestOutput)
Prompts = PromptLike | Sequence[PromptLike]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class OfflinePooling(ABC):
    """The pooling methods of `LLM`."""

    engine: Engine

    @abstractmethod
    def _wait_for(self, work: Callable[..., Awaitable[AnswerT]], *args: Any) -> AnswerT:
        """Have it done on the engine's event loop; an interrupt ends it."""

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:
        """Pool prompts: texts, `{"prompt": text}`, `{"prompt_token_ids": ids}`; one or many.

        Args:
            pooling_task: what for; None is what the model was made for.
            truncate_prompt_tokens: cut what is longer to so many tokens, -1 to what the model takes.
            lora_request: the adapter of all prompts, or one for each; it is loaded if it is not served yet.

        Raises:
            InvalidRequest: the model does not do that, or not with one of the prompts.
        """
        params = _with_task(pooling_params, pooling_task)
        pooled = self._pool(prompts, params, use_tqdm, truncate_prompt_tokens, lora_request)
        return [_output(PoolingRequestOutput, each, PoolingOutput(each.values)) for each in pooled]

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, in `outputs.embedding`."""
        params = _with_task(pooling_params, "embed")
        pooled = self._pool(prompts, params, use_tqdm, truncate_prompt_tokens, lora_request)
        return [_output(EmbeddingRequestOutput, each, EmbeddingOutput(each.values)) for each in pooled]

    def classify(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """One probability per label for each prompt, in `outputs.probs`."""
        params = _with_task(pooling_params, "classify")
        pooled = self._pool(prompts, params, use_tqdm, truncate_prompt_tokens, lora_request)
        return [_output(ClassificationRequestOutput, each, ClassificationOutput(each.values)) for each in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, in `outputs.score`: one with one, one with each of many, or many with as many."""
        (adapter,) = self._adapters(lora_request, 1)
        first, second = ([texts] if isinstance(texts, str) else list(texts) for texts in (data_1, data_2))

        async def run() -> list[Scored]:
            truncation = _truncation(truncate_prompt_tokens)
            return await self.engine.score_pairs(first, second, pooling_params, truncation=truncation, adapter=adapter)

        with Bar(total=len(second), desc="Processed prompts", disable=not use_tqdm) as bar:
            scored = self._wait_for(run)
            bar.update(len(scored))
        return [
            ScoringRequestOutput(request_id=str(index), outputs=ScoringOutput(pair.score), prompt_token_ids=[])
            for index, pair in enumerate(scored)
        ]

    def _pool(
        self,
        prompts: Prompts,
        params: PoolingParams,
        use_tqdm: bool,
        truncate_prompt_tokens: int | None,
        lora_request: Adapters,
    ) -> list[Pooled]:
        truncation = _truncation(truncate_prompt_tokens)
        asked = [_prompt(prompt, truncation) for prompt in _as_list(prompts)]
        adapters = self._adapters(lora_request, len(asked))

        async def run(on_done: Callable[[], object]) -> dict[int, Pooled]:
            found: dict[int, Pooled] = {}
            async for index, pooled in self.engine.pool(asked, params, adapter=adapters):
                found[index] = pooled
                on_done()
            return found

        with Bar(total=len(asked), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            found = self._wait_for(run, bar.update)
        return [found[index] for index in range(len(asked))]

    def _adapters(self, lora_request: object, count: int) -> list[str]:
        """The name of the adapter of each of so many prompts, which the engine serves then; empty where there is none.

        Raises:
            TroupeError: one cannot be served.
        """
        each = lora_requests(lora_request, count)
        for request in dict.fromkeys(request for request in each if request is not None):
            self._wait_for(serve, self.engine, request)
        return ["" if request is None else request.lora_name for request in each]


def _with_task(params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
    params = params or PoolingParams()
    return params if task is None else msgspec.structs.replace(params, task=task)


def _truncation(tokens: int | None) -> Truncation | None:
    if tokens is None:
        return None
    if tokens != -1 and tokens < 1:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    return Truncation(tokens, "right")


def _as_list(prompts: Any) -> Sequence[Any]:
    """One prompt stands for a list of one; a list of integers is one prompt."""
    single = isinstance(prompts, str | Mapping | TextPrompt | TokensPrompt | ChatPrompt | PairPrompt)
    if single or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _prompt(prompt: Any, truncation: Truncation | None) -> Prompt:
    made = as_prompt(prompt)
    if truncation is None or not isinstance(made, TextPrompt | TokensPrompt | ChatPrompt | PairPrompt):
        return made
    return msgspec.structs.replace(made, truncation=truncation)


def _output(
    kind: type[OutputT], pooled: Pooled, outputs: PoolingOutput | EmbeddingOutput | ClassificationOutput
) -> OutputT:
    return kind(
        request_id=pooled.request_id,
        outputs=outputs,
        prompt_token_ids=list(pooled.prompt_token_ids),
        num_cached_tokens=pooled.usage.cached_tokens,
    )
