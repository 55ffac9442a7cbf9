"""The same decoding through the engine, and through HTTP: seconds per step while all sequences run."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from troupellm.load_tests.client.client import Target
from troupellm.load_tests.client.driver import drive
from troupellm.load_tests.client.records import SampleRequest
from troupellm.load_tests.peers.process import ContestantError
from troupellm.load_tests.peers.server_process import ServerProcess
from troupellm.load_tests.peers.servers import ServerPlan
from troupellm.protocol.params.sampling import SamplingParams

START_SECONDS, RUN_SECONDS = 600.0, 900.0
WARM_UP_PROMPT, WARM_UP_TOKENS = 8, 16
"""Of one answer before the clock starts: on a GPU the graphs of one batch size are captured between its steps. Captures
inside the steps that count would be most of their time."""
Arrivals = list[tuple[float, int]]
"""When pieces of an answer came, and how many tokens each had."""
SPARE_STEPS = 4
"""Beyond those that are counted: plans under way, and what came before the last first token."""


def filling(step_tokens: int) -> dict[str, Any]:
    """Settings with which prompts fill a step, on every device and beside every reader."""
    return {
        "max_num_batched_tokens": step_tokens,
        "max_num_prefill_tokens": step_tokens,
        "itl_target_ms": 0.0,
    }


def prefill_steps(batch: int, context: int, step_tokens: int) -> int:
    """Steps of so many tokens that `batch` prompts take, beside a token for each sequence that writes already."""
    if step_tokens <= batch:
        raise ValueError(f"steps of {step_tokens} tokens have no room for prompts beside {batch} sequences")
    return -(-batch * context // (step_tokens - batch))


def tokens_of_each(batch: int, context: int, steps: int, step_tokens: int) -> int:
    """Tokens that each sequence generates so that all run together for `steps` steps: the first one runs through the
    prompts of all others."""
    return steps + prefill_steps(batch, context, step_tokens) + SPARE_STEPS


def flags_of(settings: dict[str, Any], *names: str) -> list[str]:
    """Some of an engine's settings for the command line of a server."""
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(settings[name]))]


class Together:
    """Counts what sequences write from when the last one of them begins; a constant amount of work for each piece."""

    def __init__(self, sequences: int, tokens: int) -> None:
        """tokens: that each is to write by then."""
        self._waiting, self._writing = sequences, sequences
        self._left = [tokens] * sequences
        self._begun = [False] * sequences

    def wrote(self, sequence: int, tokens: int) -> bool:
        """Whether that was all."""
        if not self._begun[sequence]:
            self._begun[sequence] = True
            self._waiting -= 1
        elif not self._waiting and self._left[sequence] > 0:
            self._left[sequence] -= tokens
            self._writing -= self._left[sequence] <= 0
        return not self._writing


def prompts_of(batch: int, context: int, vocab_size: int) -> list[list[int]]:
    source = random.Random(batch)
    return [source.choices(range(vocab_size), k=context) for _ in range(batch)]


def steady_step_seconds(answers: Sequence[Arrivals]) -> float:
    """From the last first token to the first last one, when every sequence gets a token in each step.

    Raises:
        ValueError: they never ran all at once; more steps are needed.
    """
    begin, end = max(answer[0][0] for answer in answers), min(answer[-1][0] for answer in answers)
    tokens = sum(count for answer in answers for moment, count in answer if begin < moment <= end)
    if end <= begin or not tokens:
        raise ValueError("the sequences did not run all at once: more --steps are needed")
    return (end - begin) * len(answers) / tokens


def through_engine(
    model: Path,
    settings: dict[str, Any],
    prompts: list[list[int]],
    tokens: int,
    *,
    steps: int,
    warm_up: int = 0,
    rounds: int = 1,
    round_seconds: float = 0.0,
    limit: float = START_SECONDS + RUN_SECONDS,
) -> list[float]:
    """Embedded, the model on a thread, every reader woken at every step. Seconds of a step, of each round.

    Args:
        tokens: that a sequence may write at most.
        steps: that all write at once; then it is over.
        warm_up: tokens of an answer before the others.
        rounds: at most; one that others went before is begun only within `round_seconds`.
        limit: seconds, from the engine's start to its end.

    Raises:
        TimeoutError: it took longer.
    """
    from troupellm.actors.engine.engine import Engine

    async def read(engine: Engine, prompt: list[int], most: int, piece: Callable[[int], None]) -> None:
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        async with engine.stream(prompt, params) as stream:
            async for delta in stream:
                piece(len(delta.token_ids))

    async def answer_all(engine: Engine) -> float:
        answers: list[Arrivals] = [[] for _ in prompts]
        together = Together(len(prompts), steps)
        async with anyio.create_task_group() as group:

            def piece(sequence: int, count: int) -> None:
                answers[sequence].append((time.perf_counter(), count))
                if together.wrote(sequence, count):
                    group.cancel_scope.cancel()

            for number, prompt in enumerate(prompts):
                group.start_soon(read, engine, prompt, tokens, partial(piece, number))
        return steady_step_seconds(answers)

    async def main() -> list[float]:
        with anyio.fail_after(limit):
            async with Engine(model, **settings) as engine:
                if warm_up:
                    await read(engine, prompts[0][:WARM_UP_PROMPT], warm_up, lambda _: None)
                begin, found = time.perf_counter(), [await answer_all(engine)]
                while len(found) < rounds and time.perf_counter() - begin < round_seconds:
                    found.append(await answer_all(engine))
                return found

    return anyio.run(main)


def through_http(plan: ServerPlan, log: Path, prompts: list[list[int]], tokens: int, *, warm_up: int = 0) -> float:
    """`troupellm serve`, in processes of its own.

    Args:
        tokens: that every sequence writes, see `tokens_of_each`.
        warm_up: as of `through_engine`.

    Raises:
        ContestantError: the server does not start, or a request fails.
    """
    server = ServerProcess(plan, log)
    try:
        server.wait_ready(START_SECONDS)
        if warm_up:
            asyncio.run(_read_all(server, [prompts[0][:WARM_UP_PROMPT]], warm_up))
        answers = asyncio.run(_read_all(server, prompts, tokens))
    finally:
        server.close()
    return steady_step_seconds(answers)


async def _read_all(server: ServerProcess, prompts: list[list[int]], tokens: int) -> list[Arrivals]:
    body = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    target = Target.completions(server.url, model="model", body=body, timeout=RUN_SECONDS)
    samples = [SampleRequest(prompt=prompt, output_len=tokens) for prompt in prompts]
    result = await drive(target, samples, [0.0] * len(samples), ignore_eos=True, time_limit=RUN_SECONDS)
    if failed := [record.error for record in result.records if not record.ok]:
        raise ContestantError(f"{len(failed)} requests failed: {failed[0]}")
    return [list(zip(record.chunk_times, record.chunk_tokens, strict=True)) for record in result.records]
