"""Keys and values in host memory: how fast they come back, and what keeping them there costs."""

from statistics import median
from typing import Any

from troupellm.load_tests.gpu.engine import LARGE, Models
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.kv_cache.restore import Restored, restore
from troupellm.load_tests.kv_cache.throughput import Load, Rates, throughput
from troupellm.load_tests.roofline import SIZES

PREFIX, ROUNDS = 8192, 5
LOAD = Load(requests=64, prompt_len=512, output_len=64)
LOAD_ROUNDS = 5
LIMIT_SECONDS = 240.0


def from_host(models: Models) -> Found:
    """G19: what a prefix of 8k takes longer to come back from host memory than to be found on the device, as bytes per
    second over those of a copy from pinned memory; and throughput that is lost where everything is kept and nothing
    comes back."""
    size, copy = SIZES[LARGE], models.ceilings.to_device
    if not copy:
        raise RuntimeError("copies from pinned memory were not measured")
    token_bytes = 2 * size.kv_numbers
    model: dict[str, Any] = {"vocab_size": size.vocab, "token_bytes": token_bytes}

    def settings(batch: int, length: int) -> tuple[Any, dict[str, Any]]:
        own = models.serving(LARGE, batch, length, enable_prefix_caching=True)
        return own.pop("model"), own

    async def back() -> Restored:
        folder, own = settings(1, PREFIX)
        return await restore(folder, own, PREFIX, ROUNDS, None, **model)

    async def crowd() -> Rates:
        folder, own = settings(LOAD.requests, LOAD.prompt_len + LOAD.output_len)
        return await throughput(folder, own, LOAD, LOAD_ROUNDS, **model)

    restored = models.run(back, LIMIT_SECONDS)
    rates = models.run(crowd, LIMIT_SECONDS)
    seconds = median(one - other for one, other in zip(restored.restored, restored.held, strict=True))
    rate = min(restored.tokens_restored) * token_bytes / seconds
    kept = median(on / off for on, off in zip(rates.on, rates.off, strict=True))
    return {"restored": rate / copy, "lost": 1 - kept}, {
        "GB/s": rate / 1e9,
        "pinned copy GB/s": copy / 1e9,
        "restored ms": median(restored.restored) * 1e3,
        "on the device ms": median(restored.held) * 1e3,
        "computed ms": median(restored.computed) * 1e3,
        "tokens restored": min(restored.tokens_restored),
        "tokens/s on": median(rates.on),
        "tokens/s off": median(rates.off),
        "blocks stored": rates.stored_blocks,
        "tokens hit": rates.hit_tokens,
    }
