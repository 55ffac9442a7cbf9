"""Gaps between the tokens of streams while long prompts come."""

from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import anyio
import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.load_tests.gpu.engine import LARGE, Models
from troupellm.load_tests.gpu.engines import first_token_seconds, opened, random_tokens
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.roofline import BF16, SIZES, decode_seconds, prefill_seconds

STREAMS, CONTEXT = 32, 1024
PROMPT, PROMPTS = 8192, 10
EVERY_SECONDS = 1.0
CHUNK = 640
"""Tokens of a prompt in a step: of fewer each costs the streams' own step once more, of more a step takes longer than
four without any."""
LONGEST_ANSWER = 8192
"""Streams go on until the prompts are done."""
LIMIT_SECONDS = 120.0


class Load(msgspec.Struct, frozen=True):
    gaps: list[float]
    """Seconds between tokens, all streams together, while prompts came."""
    first_tokens: list[float]
    """Seconds from each prompt to its first token."""


def while_prompts_come(models: Models) -> Found:
    """G27: the 99th percentile of gaps over their median; and tokens of prompts per second over those of the same load
    whose prompts are computed in one step each."""
    chunked, whole = (_under(models, chunk) for chunk in (CHUNK, PROMPT))
    middle, late = _percentiles(chunked.gaps)
    found = {
        "p99 / p50": late / middle,
        "prompts' rate": median(whole.first_tokens) / median(chunked.first_tokens),
    }
    size, roof = SIZES[LARGE], models.roof()
    step = decode_seconds(size, BF16, roof, batch=STREAMS, context=CONTEXT)
    return found, {
        "p50 ms": middle * 1e3,
        "p99 ms": late * 1e3,
        "step, roofline ms": step * 1e3,
        "tokens of a chunk": CHUNK,
        "first token ms": median(chunked.first_tokens) * 1e3,
        "first token of whole prompts ms": median(whole.first_tokens) * 1e3,
        "prompt, roofline ms": prefill_seconds(size, BF16, roof, tokens=PROMPT) * 1e3,
        "p99 / p50 of whole prompts": _percentiles(whole.gaps)[1] / _percentiles(whole.gaps)[0],
    }


def _under(models: Models, chunk: int) -> Load:
    length = max(CONTEXT + LONGEST_ANSWER, PROMPT) + 16
    blocks = (STREAMS * (CONTEXT + LONGEST_ANSWER // 2) + 2 * PROMPT) // 16  # streams end early
    more = {
        "max_num_batched_tokens": PROMPT + STREAMS,
        "max_num_prefill_tokens": chunk,
        "itl_target_ms": 0.0,
        "num_gpu_blocks_override": blocks,
        "cudagraph_capture_sizes": (STREAMS,),
    }
    settings = models.serving(LARGE, STREAMS + 2, length, **more)

    async def measure() -> Load:
        async with opened(settings) as engine:
            return await _loaded(engine)

    return models.run(measure, LIMIT_SECONDS)


async def _loaded(engine: Engine) -> Load:
    vocab = SIZES[LARGE].vocab
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    first_tokens = list[float]()

    async def read(row: int) -> None:
        options: dict[str, Any] = {"max_tokens": LONGEST_ANSWER, "temperature": 0.0, "ignore_eos": True}
        async with engine.stream(random_tokens(CONTEXT, vocab, row), **options) as stream:
            async for _ in stream:
                times[row].append(perf_counter())

    async def ask(number: int) -> None:
        first_tokens.append(await first_token_seconds(engine, random_tokens(PROMPT, vocab, f"prompt {number}")))

    async with anyio.create_task_group() as group:
        for row in range(STREAMS):
            group.start_soon(read, row)
        await ask(-1)  # warms up, and all streams are there by then
        first_tokens.clear()
        begin = perf_counter()
        async with anyio.create_task_group() as prompts:
            for number in range(PROMPTS):
                prompts.start_soon(ask, number)
                await anyio.sleep(EVERY_SECONDS)
        group.cancel_scope.cancel()
    gaps = [after - before for own in times for before, after in pairwise(own) if before >= begin]
    return Load(gaps, first_tokens)


def _percentiles(gaps: list[float]) -> tuple[float, float]:
    """The median and the 99th."""
    cuts = quantiles(gaps, n=100)
    return cuts[49], cuts[98]
