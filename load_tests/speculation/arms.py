"""Two engines that answer the same questions, one of them with drafts, in rounds that alternate."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec

from troupellm.load_tests.speculation.question import Question

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

SPARE_TOKENS = 64


class Round(msgspec.Struct):
    """One engine's answers to all questions."""

    seconds: float
    tokens: int
    steps: int
    """That its scheduler planned."""
    drafts: int
    accepted: int
    answers: list[list[int]]


class Measured(msgspec.Struct):
    """Interleaved rounds of both."""

    name: str
    method: str
    batch: int
    plain: list[Round]
    drafting: list[Round]

    @property
    def ratio(self) -> float:
        """Tokens per second with drafts over those without, the median over rounds."""
        return median(
            (ours.tokens / ours.seconds) / (theirs.tokens / theirs.seconds)
            for ours, theirs in zip(self.drafting, self.plain, strict=True)
        )

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second without and with, medians."""
        without, with_drafts = (
            median(each.tokens / each.seconds for each in rounds) for rounds in (self.plain, self.drafting)
        )
        return without, with_drafts

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a sequence in a step in which it had drafts."""
        drafts = sum(each.drafts for each in self.drafting)
        return 1 + sum(each.accepted for each in self.drafting) / drafts if drafts else 0.0

    @property
    def step_ratio(self) -> float:
        """Time of a step with drafts over that of one without, prompts included in both."""
        return median(
            (ours.seconds / ours.steps) / (theirs.seconds / theirs.steps)
            for ours, theirs in zip(self.drafting, self.plain, strict=True)
        )

    @property
    def differing(self) -> int:
        """Answers that are not the same."""
        return sum(
            ours != theirs
            for one, other in zip(self.drafting, self.plain, strict=True)
            for ours, theirs in zip(one.answers, other.answers, strict=True)
        )


class Arms:
    """The engines: open while they are measured."""

    def __init__(
        self,
        folder: Path | None,
        speculative: dict[str, Any],
        *,
        batch: int,
        longest: int,
        threads: int | None,
        embedded: bool,
        **more: Any,
    ) -> None:
        """
        Args:
            folder: None is the built-in model.
            batch: sequences at once, at most.
            longest: tokens of a sequence.
            more: settings of both.
        """
        self._folder, self._speculative, self._stack = folder, speculative, AsyncExitStack()
        self._settings: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "num_threads": threads or len(os.sched_getaffinity(0)),
            "max_num_seqs": batch,
            "max_model_len": longest + SPARE_TOKENS,
            "worker_process": not embedded,
            "spare_worker": False,  # it would import torch beside the first rounds
            **more,
        }

    async def __aenter__(self) -> Self:
        from troupellm.actors.engine.engine import Engine

        async with AsyncExitStack() as stack:
            self._plain = await stack.enter_async_context(Engine(self._folder, **self._settings))
            self._drafting = await stack.enter_async_context(
                Engine(self._folder, **self._settings, speculative_config=self._speculative)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def measure(
        self,
        name: str,
        questions: Sequence[Question] | Callable[[int], Sequence[Question]],
        *,
        rounds: int,
        batch: int = 1,
    ) -> Measured:
        """Round 0 warms up; then each engine begins every other round.

        Args:
            questions: of every round, or of a round by its number.
        """
        found = Measured(name, str(self._speculative["method"]), batch, [], [])
        for number in range(rounds + 1):
            arms = [(self._plain, found.plain), (self._drafting, found.drafting)]
            asked = questions(number) if callable(questions) else questions
            for engine, into in arms if number % 2 else arms[::-1]:
                answered = await _round(engine, asked, batch)
                if number:
                    into.append(answered)
        return found


async def _round(engine: "Engine", questions: Sequence[Question], batch: int) -> Round:
    """Each answer that ends makes room for the next question: rows that are quick do not wait for the others."""
    answers: list[list[int]] = [[] for _ in questions]

    places = anyio.CapacityLimiter(batch)

    async def ask(index: int) -> None:
        asked = questions[index]
        async with places:
            completion = await engine.generate(
                asked.prompt, max_tokens=asked.max_tokens, temperature=0.0, ignore_eos=asked.ignore_eos
            )
        answers[index] = list(completion.token_ids)

    before, begin = engine.snapshot().scheduler, time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index in range(len(questions)):
            tasks.start_soon(ask, index)
    seconds, after = time.perf_counter() - begin, engine.snapshot().scheduler
    return Round(
        seconds=seconds,
        tokens=sum(map(len, answers)),
        steps=max(1, after.steps - before.steps),
        drafts=after.drafts - before.drafts,
        accepted=after.accepted_draft_tokens - before.accepted_draft_tokens,
        answers=answers,
    )
