"""Far more requests than a pool of 16 blocks holds, under both ways of preemption: every answer as if alone."""

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from troupellm.load_tests.random_model import SHAPES, write_random_model

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

SETTINGS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 16, "max_model_len": 256}
PROMPT, ANSWER = (8, 90), (8, 60)
BESIDE = 24
"""Requests that are open at once."""


async def crowd(requests: int) -> dict[str, int]:
    """By mode of preemption, how many answers differ from those of a roomy engine, asked one by one."""
    from troupellm.actors.engine.engine import Engine

    source, shape = random.Random(3), SHAPES["tiny"]
    asked = [
        (source.choices(range(shape.vocab_size), k=source.randint(*PROMPT)), source.randint(*ANSWER))
        for _ in range(requests)
    ]
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="troupe-crowd-") as name:
        folder = write_random_model(Path(name) / "model", shape)
        async with Engine(folder, **SETTINGS) as engine:
            alone = [await _ask(engine, *each) for each in asked]
        for mode in ("recompute", "offload"):
            more: dict[str, Any] = {
                "num_gpu_blocks_override": 16,
                "kv_offloading_size": "16MiB",
                "preemption_mode": mode,
            }
            async with Engine(folder, **SETTINGS, **more) as engine:
                answers = await _all(engine, asked)
                snapshot = engine.snapshot().scheduler
            different = sum(one != other for one, other in zip(answers, alone, strict=True))
            print(
                f"{requests} requests on 16 blocks, {mode}: {snapshot.preemptions} preemptions, {different} different"
            )
            found[mode] = different
    return found


async def _all(engine: "Engine", asked: list[tuple[list[int], int]]) -> list[tuple[int, ...]]:
    answers: list[tuple[int, ...]] = [()] * len(asked)
    places = anyio.CapacityLimiter(BESIDE)

    async def ask(index: int) -> None:
        async with places:
            answers[index] = await _ask(engine, *asked[index])

    async with anyio.create_task_group() as group:
        for index in range(len(asked)):
            group.start_soon(ask, index)
    return answers


async def _ask(engine: "Engine", prompt: list[int], tokens: int) -> tuple[int, ...]:
    completion = await engine.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return completion.token_ids
