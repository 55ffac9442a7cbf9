"""Goals of whole workloads, all requests at once: the least time that they can take over what they took."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from troupellm.load_tests.gpu.engine import LARGE, SMALL, Models
from troupellm.load_tests.gpu.engines import answer_all, missing_graphs, opened, random_tokens, settle
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.roofline import BF16, FP8_ALL, SIZES, workload_seconds
from troupellm.load_tests.step.bare import BLOCK_SIZE

KILO = 1024
LLAMA = "llama-8b"
PUBLIC, PUBLIC_LENGTHS, PUBLIC_TEMPERATURE = 256, (100, 1024), 0.6
MANY, SATURATING = 256, 512
LONGEST = 100.0
"""Seconds that a workload may take at best: of one that is longer, fewer requests are run."""
SLOWEST, START_SECONDS = 2.5, 60.0
"""A measure is given up after so many times the least time, and what starting takes."""
WARM_UP = 8
"""Requests with short answers that go before, so that all kernels of prompts are compiled."""

Lengths = Sequence[tuple[int, int]]
"""Of prompts and answers."""


class Ran(msgspec.Struct, frozen=True):
    seconds: float
    capacity: int
    """Tokens that the cache holds."""
    preemptions: int
    missing_graphs: int


def public_lengths() -> list[tuple[int, int]]:
    """Of the public benchmark of 256 requests, which draws prompts, too."""
    source = random.Random(0)
    prompts = [len([source.randint(0, 10000) for _ in range(source.randint(*PUBLIC_LENGTHS))]) for _ in range(PUBLIC)]
    return [(prompt, source.randint(*PUBLIC_LENGTHS)) for prompt in prompts]


def public(models: Models) -> Found:
    """G6. The first round is the warm-up: batches shrink, and each of their sizes wants a graph of its own."""
    size, lengths = SIZES[SMALL], public_lengths()
    least = workload_seconds(size, BF16, models.roof(), lengths)
    blocks = sum(-(-(prompt + answer) // BLOCK_SIZE) + 1 for prompt, answer in lengths)
    more = {"num_gpu_blocks_override": blocks, "cudagraph_capture_sizes": ()}
    ran = _run(models, SMALL, lengths, lengths, 2 * least, PUBLIC_TEMPERATURE, **more)
    return {"ratio": least / ran.seconds}, _details(lengths, least, ran)


def equal(models: Models) -> Found:
    """G7: 256 prompts and answers of equal lengths, with 8B in bfloat16."""
    found, details = dict[str, float](), dict[str, Any]()
    for name, tokens in (("1k/1k", KILO), ("4k/4k", 4 * KILO)):
        whole = workload_seconds(SIZES[LARGE], BF16, models.roof(), [(tokens, tokens)] * MANY)
        lengths = [(tokens, tokens)] * max(1, int(MANY * min(1.0, LONGEST / whole)))
        ran = _run(models, LARGE, lengths, _short(lengths), whole)
        least = workload_seconds(SIZES[LARGE], BF16, models.roof(), lengths, ran.capacity)
        found[name], details[name] = least / ran.seconds, _details(lengths, least, ran)
    return found, details


def saturated(models: Models) -> Found:
    """G7b: Llama-8B shapes, weights and cache in fp8, more requests than fill the device."""
    found, details, roof = dict[str, float](), dict[str, Any](), models.roof("fp8")
    for name, tokens in (("1k/1k", KILO), ("2k/2k", 2 * KILO)):
        lengths = [(tokens, tokens)] * SATURATING
        whole = workload_seconds(SIZES[LLAMA], FP8_ALL, roof, lengths)
        ran = _run(models, LLAMA, lengths, _short(lengths), whole, quantization="fp8", kv_cache_dtype="fp8")
        least = workload_seconds(SIZES[LLAMA], FP8_ALL, roof, lengths, ran.capacity)
        found[name], details[name] = least / ran.seconds, _details(lengths, least, ran)
    return found, details


def _short(lengths: Lengths) -> Lengths:
    return [(prompt, 4) for prompt, _ in lengths[:WARM_UP]]


def _run(
    models: Models, name: str, lengths: Lengths, before: Lengths, least: float, temperature: float = 0.0, **more: Any
) -> Ran:
    """before: what warms up. least: seconds that everything takes at best."""
    batch, longest = len(lengths), max(prompt + answer for prompt, answer in lengths)
    quarters = tuple(sorted({max(1, batch * part // 4) for part in (1, 2, 3, 4)}))
    own = {"num_gpu_blocks_override": None, "cudagraph_capture_sizes": quarters, **more}
    settings = models.serving(name, batch, longest + 8, **own)
    vocab = SIZES[name].vocab
    first = [(random_tokens(prompt, vocab, f"first {row}"), answer) for row, (prompt, answer) in enumerate(before)]
    requests = [(random_tokens(prompt, vocab, row), answer) for row, (prompt, answer) in enumerate(lengths)]

    async def measure() -> Ran:
        async with opened(settings) as engine:
            await answer_all(engine, first, temperature=temperature)
            await settle(engine)
            preempted = engine.snapshot().scheduler.preemptions
            seconds = await answer_all(engine, requests, temperature=temperature)
            preempted = engine.snapshot().scheduler.preemptions - preempted
            capacity = engine.ready.num_blocks * engine.ready.block_size
            return Ran(seconds, capacity, preempted, missing_graphs(engine))

    return models.run(measure, SLOWEST * least + START_SECONDS)


def _details(lengths: Lengths, least: float, ran: Ran) -> dict[str, Any]:
    tokens = sum(answer for _, answer in lengths)
    return {
        "requests": len(lengths),
        "roofline s": least,
        "s": ran.seconds,
        "tokens/s": tokens / ran.seconds,
        "roofline tokens/s": tokens / least,
        **msgspec.structs.asdict(ran),
    }
