"""The value of a cached prefix: to its next reader, and to many simultaneous readers."""

from statistics import median

from troupellm.load_tests.gpu.engine import LARGE, STEPS, Models
from troupellm.load_tests.gpu.engines import first_token_seconds, opened, random_tokens
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.roofline import BF16, SIZES, decode_seconds, prefill_seconds
from troupellm.load_tests.step.bare import BLOCK_SIZE

KILO = 1024
ROUNDS = 5
READERS = 64
LIMIT_SECONDS = 120.0


def hit(models: Models) -> Found:
    """G18: time to the first token of a prompt of 8k that is cached but for its last block, over that of a new one."""
    tokens, vocab = 8 * KILO, SIZES[LARGE].vocab
    settings = models.serving(LARGE, 2, tokens + BLOCK_SIZE, enable_prefix_caching=True)

    async def measure() -> tuple[list[float], list[float], int]:
        cold, warm = list[float](), list[float]()
        async with opened(settings) as engine:
            before = engine.snapshot().scheduler.prefix_hits
            for number in range(ROUNDS + 1):
                prompt = random_tokens(tokens, vocab, number)
                times = [await first_token_seconds(engine, prompt) for _ in range(2)]
                if number:  # the first round warms up
                    cold.append(times[0])
                    warm.append(times[1])
            found = engine.snapshot().scheduler.prefix_hits - before
        return cold, warm, found // (ROUNDS + 1)

    cold, warm, found = models.run(measure, LIMIT_SECONDS)
    least = prefill_seconds(SIZES[LARGE], BF16, models.roof(), tokens=tokens)
    return {"ratio": median(warm) / median(cold)}, {
        "cold ms": median(cold) * 1e3,
        "cached ms": median(warm) * 1e3,
        "cold roofline ms": least * 1e3,
        "cached tokens": found,
    }


def common(models: Models) -> Found:
    """G24: a decoding step of 64 sequences behind a prefix of 8k that all have in common, over one of the same
    sequences without it; 1k of each is its own."""
    prefix, own, steps = 8 * KILO, KILO, 2 * STEPS
    blocks = prefix // BLOCK_SIZE + READERS * (-(-(own + steps) // BLOCK_SIZE) + 2)
    length, size, roof = prefix + own + steps + 32, SIZES[LARGE], models.roof()
    seconds = dict[int, float]()
    with models.worker(LARGE, READERS, length, num_gpu_blocks_override=blocks) as worker:
        for shared in (0, prefix):
            worker.fill(READERS, own, steps, shared=shared)
            seconds[shared] = worker.step_seconds(STEPS)
    alone = decode_seconds(size, BF16, roof, batch=READERS, context=own + STEPS / 2)
    apart = decode_seconds(size, BF16, roof, batch=READERS, context=prefix + own + STEPS / 2)
    return {"ratio": seconds[prefix] / seconds[0]}, {
        "ms": seconds[prefix] * 1e3,
        "without ms": seconds[0] * 1e3,
        "without, roofline ms": alone * 1e3,
        "read by each, roofline ms": apart * 1e3,
    }
