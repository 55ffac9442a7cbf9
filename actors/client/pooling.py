"""Vectors, scores and labels, whether the engine lives in this process or in another one."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from troupellm.actors.admission.prompts import PromptLike, as_prompt, as_salt, estimate_tokens
from troupellm.actors.client.cosines import cosines
from troupellm.actors.client.mapping import map_streams
from troupellm.actors.client.stream import Stream
from troupellm.protocol.config.kv_hints import NO_HINTS, KVHints
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ManyPrompts, PairPrompt, Submission, TextPrompt, Truncation
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.protocol.params.outputs import Pooled
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.quota import Quota

MOST_AT_ONCE = 256
"""Prompts of one call inside the engine at once: as many as a step takes by default."""
ROOM_SHARE = 4
"""And no more than one in so many of the engine's places, so that others find some."""
_NOTHING_GENERATED = SamplingParams(temperature=0.0, max_tokens=1)


class Scored(msgspec.Struct, frozen=True):
    score: float
    prompt_tokens: int
    """Computed for this pair alone; a text that several pairs share counts once, with the first."""
    quota: Quota | None = None
    truncated: bool = False
    """One of the two texts was longer and was cut."""


class PoolingApi(ABC):
    """Requests that end with their prompt. A subclass says where the requests go."""

    num_replicas = 1
    """Engines that compute requests."""

    def check_replica(self, hints: KVHints) -> None:
        """
        Raises:
            InvalidRequest: the hints name a replica that does not exist.
        """
        if hints.replica is not None and not 0 <= hints.replica < self.num_replicas:
            text = f"X-data-parallel-rank must be in 0..{self.num_replicas - 1}, got {hints.replica}"
            raise InvalidRequest(text, param="X-data-parallel-rank")

    @property
    @abstractmethod
    def _num_places(self) -> int:
        """How many requests the engine has room for."""

    @property
    @abstractmethod
    def ready(self) -> WorkerReady:
        """Properties of the loaded model."""

    @abstractmethod
    def _new_request_id(self) -> str: ...

    @abstractmethod
    def _open(self, submission: Submission) -> Stream:
        """The stream of a request that is handed over when the stream is entered."""

    def pool(
        self,
        prompts: Sequence[PromptLike],
        params: PoolingParams | None = None,
        *,
        wait: bool = True,
        request_id: str | None = None,
        tenant: str = "",
        cache_salt: str | bytes = b"",
        deadline: float | None = None,
        concurrency: int | None = None,
        adapter: str | Sequence[str] = "",
        hints: KVHints = NO_HINTS,
        taken: Callable[[int], None] | None = None,
    ) -> AsyncIterator[tuple[int, Pooled]]:
        """(index, vector) of every prompt as each is done, `concurrency` at a time.

        A call with many prompts takes places as it goes and gives them back, so that it neither needs room for all of
        them at once nor keeps others out. To its tenant's limits it is one request.

        Args:
            concurrency: None is a part of the engine's room.
            wait: wait for the first prompt's place instead of raising EngineOverloaded; the others always wait.
            request_id: prompt i is known as `request_id`-i.
            deadline: seconds within which each must have been scheduled.
            adapter: name of a LoRA adapter, of all prompts or one for each; empty is the model itself.
            hints: about the KV cache; only the replica counts.
            taken: told how many tokens a prompt has, as soon as the engine has it.
        """
        self.check_replica(hints)
        made = [as_prompt(prompt) for prompt in prompts]
        salts = [as_salt(cache_salt, prompt) for prompt in prompts]
        adapters = [adapter] * len(made) if isinstance(adapter, str) else adapter
        name, tokens = request_id or self._new_request_id(), sum(map(estimate_tokens, made))
        first: list[Stream] = []

        def stream(index: int) -> Stream:
            opened = self._open(
                Submission(
                    request_id=f"{name}-{index}",
                    prompt=made[index],
                    params=_NOTHING_GENERATED,
                    wait=wait or index > 0,
                    tenant=tenant,
                    cache_salt=salts[index],
                    deadline=deadline,
                    streaming=False,
                    pooling=params or PoolingParams(),
                    adapter=adapters[index],
                    hints=hints,
                    many_prompts=ManyPrompts(first=index == 0, tokens=tokens) if len(made) > 1 else None,
                )
            )
            if not first:
                first.append(opened)
            return opened

        def window() -> int:
            """The first prompt's answer tells how many more requests the tenant may have inside."""
            most = concurrency or min(MOST_AT_ONCE, self._num_places // ROOM_SHARE)
            quota = first[0].quota if first else None
            left = None if quota is None else quota.remaining_concurrency
            return most if left is None else min(most, 1 + left)

        async def collect(opened: Stream) -> Pooled:
            if taken is not None:
                await opened.opened()
                taken(len(opened.prompt_token_ids))
            return await opened.collect_pooled()

        makers = (partial(stream, index) for index in range(len(made)))
        return map_streams(makers, window, collect)

    async def pool_all(
        self, prompts: Sequence[PromptLike], params: PoolingParams | None = None, **options: Any
    ) -> list[Pooled]:
        """The same as a list, in the order of the prompts."""
        found = {index: pooled async for index, pooled in self.pool(prompts, params, **options)}
        return [found[index] for index in range(len(prompts))]

    async def embed(
        self, prompts: str | Sequence[PromptLike], params: PoolingParams | None = None, **options: Any
    ) -> list[list[float]]:
        """One vector per prompt: a text, or a list of texts and lists of token ids.

        Args:
            options: those of `pool`.

        Raises:
            InvalidRequest: the model makes no embeddings, or not of this prompt.
        """
        wanted = _for_task(params, "embed")
        return [pooled.values for pooled in await self.pool_all(_as_list(prompts), wanted, **options)]

    async def classify(
        self, prompts: str | Sequence[PromptLike], params: PoolingParams | None = None, **options: Any
    ) -> list[list[float]]:
        """One probability per label for each prompt; `ready.pooling.labels` are the labels.

        Raises:
            InvalidRequest: the model is no classifier.
        """
        wanted = _for_task(params, "classify")
        return [pooled.values for pooled in await self.pool_all(_as_list(prompts), wanted, **options)]

    async def score(
        self,
        first: str | Sequence[PromptLike],
        second: str | Sequence[PromptLike],
        params: PoolingParams | None = None,
        **options: Any,
    ) -> list[float]:
        """How well texts go together: one with one, one with each of many, or many with as many.

        A cross-encoder reads each pair; of a model that embeds it is the cosine of the two vectors.

        Raises:
            InvalidRequest: the model can do neither, or the texts are not so many.
        """
        scored = await self.score_pairs(_as_list(first), _as_list(second), params, **options)
        return [pair.score for pair in scored]

    async def score_pairs(
        self,
        first: Sequence[PromptLike],
        second: Sequence[PromptLike],
        params: PoolingParams | None = None,
        *,
        truncation: Truncation | None = None,
        **options: Any,
    ) -> list[Scored]:
        """See `score`.

        Args:
            truncation: how what is too long is cut; None refuses it.
        """
        if not second or len(first) not in (1, len(second)):
            raise InvalidRequest(f"there must be one first text or as many as second ones ({len(second)})")
        ability = self.ready.pooling
        if ability is not None and ability.scores_by_vectors:
            return await self._score_vectors(first, second, params, truncation, **options)
        wanted = _for_task(params, "score")
        firsts = list(first) * len(second) if len(first) == 1 else first
        pairs = [_pair(one, other, truncation) for one, other in zip(firsts, second, strict=True)]
        pooled = await self.pool_all(pairs, wanted, **options)
        return [Scored(each.values[0], each.usage.prompt_tokens, each.quota, each.usage.truncated) for each in pooled]

    async def _score_vectors(
        self,
        first: Sequence[PromptLike],
        second: Sequence[PromptLike],
        params: PoolingParams | None,
        truncation: Truncation | None,
        **options: Any,
    ) -> list[Scored]:
        prompts = [_cut(prompt, truncation) for prompt in (*first, *second)]
        pooled = await self.pool_all(prompts, _for_task(params, "embed"), **options)
        ones, others = pooled[: len(first)], pooled[len(first) :]
        scores = await cosines([one.vector for one in ones], [other.vector for other in others])
        scored = []
        for index, (other, score) in enumerate(zip(others, scores, strict=True)):
            place = index if len(ones) > 1 else 0
            one = ones[place].usage
            tokens = other.usage.prompt_tokens + (one.prompt_tokens if place == index else 0)
            scored.append(Scored(score, tokens, other.quota, one.truncated or other.usage.truncated))
        return scored


def _for_task(params: PoolingParams | None, task: str) -> PoolingParams:
    return msgspec.structs.replace(params or PoolingParams(), task=task)


def _as_list(prompts: str | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """One text stands for a list of one, a list of integers is one prompt."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts


def _cut(prompt: PromptLike, truncation: Truncation | None) -> PromptLike:
    return TextPrompt(prompt, truncation=truncation) if isinstance(prompt, str) else prompt


def _pair(first: PromptLike, second: PromptLike, truncation: Truncation | None) -> PromptLike:
    if not (isinstance(first, str) and isinstance(second, str)):
        raise InvalidRequest("a cross-encoder scores texts, not token ids", code="invalid_type")
    return PairPrompt(first, second, truncation)
