"""A crowd of new prompts with offload on, where it can give nothing, beside the same with it off."""

import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

BLOCK = 16


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A round."""

    requests: int
    prompt_len: int
    output_len: int


class Rates(msgspec.Struct):
    """Tokens per second, an entry per round."""

    off: list[float]
    on: list[float]
    off_cpu: list[float]
    """Processor seconds of the same rounds, all threads: less noisy on a busy machine."""
    on_cpu: list[float]
    stored_blocks: int = 0
    hit_tokens: int = 0


async def throughput(
    folder: Path, settings: dict[str, Any], load: Load, repeats: int, *, vocab_size: int, token_bytes: int
) -> Rates:
    """Rounds of both engines in turn, whose order changes, so that a change of the machine's speed meets both. Host
    memory holds less than a round, so that the first one, which does not count, has touched all of it.

    Args:
        token_bytes: of one token's keys and values.
    """
    from troupellm.actors.engine.engine import Engine

    length = load.prompt_len + load.output_len
    blocks = load.requests * (length // BLOCK + 2)
    block_bytes = token_bytes * BLOCK
    own = {**settings, "block_size": BLOCK, "num_gpu_blocks_override": blocks, "max_model_len": 2 * length}
    source = random.Random(2)
    async with AsyncExitStack() as stack:
        off = await stack.enter_async_context(Engine(folder, **own))
        on = await stack.enter_async_context(Engine(folder, **own, kv_offloading_size=f"{blocks // 2 * block_bytes}B"))
        rates = Rates([], [], [], [])
        for number in range(repeats + 1):
            sides = [(off, rates.off, rates.off_cpu), (on, rates.on, rates.on_cpu)]
            prompts = [source.choices(range(vocab_size), k=load.prompt_len) for _ in range(load.requests)]
            for engine, found, worked in sides if number % 2 else sides[::-1]:
                before = time.process_time()
                seconds = await _round(engine, prompts, load.output_len)
                if number:  # the first round warms up
                    found.append(load.requests * length / seconds)
                    worked.append(time.process_time() - before)
        offload = on.snapshot().scheduler.offload
        assert offload is not None
        rates.stored_blocks = sum(tier.stores for tier in offload.tiers)
        rates.hit_tokens = offload.hit_tokens
    return rates


async def _round(engine: "Engine", prompts: list[list[int]], output_len: int) -> float:
    begin = time.perf_counter()
    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(_ask, engine, prompt, output_len)
    return time.perf_counter() - begin


async def _ask(engine: "Engine", prompt: list[int], output_len: int) -> None:
    await engine.generate(prompt, max_tokens=output_len, temperature=0.0, ignore_eos=True)
