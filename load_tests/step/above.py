"""The same decoding through the engine, and through HTTP: seconds per step while all sequences run."""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio

from troupellm.load_tests.peers.process import ContestantError
from troupellm.load_tests.peers.server_process import ServerProcess
from troupellm.load_tests.peers.servers import ServerPlan
from troupellm.load_tests.serve.client import Target
from troupellm.load_tests.serve.driver import drive
from troupellm.load_tests.serve.records import SampleRequest
from troupellm.protocol.sampling import SamplingParams

START_SECONDS, RUN_SECONDS = 600.0, 900.0
WARM_UP_PROMPT, WARM_UP_TOKENS = 8, 16
"""Of one answer before the clock starts: on a GPU the graphs of one batch size are captured between its steps. Captures
inside the steps that count would be most of their time."""
Arrivals = list[tuple[float, int]]
"""When pieces of an answer came, and how many tokens each had."""


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
    model: Path, settings: dict[str, Any], prompts: list[list[int]], steps: int, *, warm_up: int = 0
) -> float:
    """Embedded, the model on a thread, every reader woken at every step.

    Args:
        warm_up: tokens of an answer before the others.
    """
    from troupellm.actors.engine import Engine

    answers: list[Arrivals] = [[] for _ in prompts]

    async def read(engine: Engine, prompt: list[int], tokens: int, answer: Arrivals) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        async with engine.stream(prompt, params) as stream:
            async for delta in stream:
                answer.append((time.perf_counter(), len(delta.token_ids)))

    async def main() -> None:
        async with Engine(model, **settings) as engine:
            if warm_up:
                await read(engine, prompts[0][:WARM_UP_PROMPT], warm_up, [])
            async with anyio.create_task_group() as group:
                for prompt, answer in zip(prompts, answers, strict=True):
                    group.start_soon(read, engine, prompt, steps, answer)

    anyio.run(main)
    return steady_step_seconds(answers)


def through_http(plan: ServerPlan, log: Path, prompts: list[list[int]], steps: int, *, warm_up: int = 0) -> float:
    """`troupellm serve` as it comes, in processes of its own. Arguments as of `through_engine`.

    Raises:
        ContestantError: the server does not start, or a request fails.
    """
    server = ServerProcess(plan, log)
    try:
        server.wait_ready(START_SECONDS)
        if warm_up:
            asyncio.run(_read_all(server, [prompts[0][:WARM_UP_PROMPT]], warm_up))
        answers = asyncio.run(_read_all(server, prompts, steps))
    finally:
        server.close()
    return steady_step_seconds(answers)


async def _read_all(server: ServerProcess, prompts: list[list[int]], steps: int) -> list[Arrivals]:
    body = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    target = Target.make(
        urlsplit(server.url), "/v1/completions", api_key=None, chat=False, model="model", body=body, timeout=RUN_SECONDS
    )
    samples = [SampleRequest(prompt=prompt, output_len=steps) for prompt in prompts]
    result = await drive(target, samples, [0.0] * len(samples), ignore_eos=True, time_limit=RUN_SECONDS)
    if failed := [record.error for record in result.records if not record.ok]:
        raise ContestantError(f"{len(failed)} requests failed: {failed[0]}")
    return [list(zip(record.chunk_times, record.chunk_tokens, strict=True)) for record in result.records]
