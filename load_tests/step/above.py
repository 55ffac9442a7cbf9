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


def through_engine(model: Path, settings: dict[str, Any], prompts: list[list[int]], steps: int) -> float:
    """Embedded, the model on a thread, every reader woken at every step."""
    from troupellm.actors.engine import Engine

    answers: list[Arrivals] = [[] for _ in prompts]

    async def read(engine: Engine, index: int) -> None:
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
        async with engine.stream(prompts[index], params) as stream:
            async for delta in stream:
                answers[index].append((time.perf_counter(), len(delta.token_ids)))

    async def main() -> None:
        async with Engine(model, **settings) as engine, anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(read, engine, index)

    anyio.run(main)
    return steady_step_seconds(answers)


def through_http(plan: ServerPlan, log: Path, prompts: list[list[int]], steps: int) -> float:
    """`troupellm serve` as it comes, in processes of its own.

    Raises:
        ContestantError: the server does not start, or a request fails.
    """
    server = ServerProcess(plan, log)
    try:
        server.wait_ready(START_SECONDS)
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
