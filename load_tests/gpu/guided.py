"""The cost of a grammar per token on a device."""

from statistics import median
from typing import Any

from troupellm.load_tests.bench.guide import Ratio, ratio_of
from troupellm.load_tests.gpu.engine import LARGE, Models
from troupellm.load_tests.gpu.engines import opened
from troupellm.load_tests.gpu.gathered import Found

BATCHES = (1, 32)
ANSWER, ROUNDS = 192, 5
TEMPERATURE = 1.0
"""At which that benchmark asks."""
LIMIT_SECONDS = 120.0


def per_token(models: Models) -> Found:
    """G21: time per token of answers that a JSON schema guides over that of answers without, interleaved. Forced
    tokens come with the token before them: such a step gives more than one token."""
    found, details = dict[str, float](), dict[str, Any]()
    for batch in BATCHES:
        settings = models.serving(LARGE, batch, ANSWER + 64)

        async def measure(settings: dict[str, Any] = settings, batch: int = batch) -> Ratio:
            async with opened(settings, temperature=TEMPERATURE) as engine:
                return await ratio_of(engine, LARGE, batch, ANSWER, ROUNDS)

        ratio = models.run(measure, LIMIT_SECONDS)
        found[f"batch {batch}"] = ratio.ratio
        details[f"batch {batch}"] = _details(ratio)
    return found, details


def _details(ratio: Ratio) -> dict[str, Any]:
    guided, plain = median(ratio.guided), median(ratio.plain)
    at_once, without = median(ratio.guided_pieces), median(ratio.plain_pieces)
    return {
        "ms": guided * 1e3,
        "without ms": plain * 1e3,
        "runs": len(ratio.guided),
        "tokens at once": at_once,
        "without, tokens at once": without,
        "step over one without": guided * at_once / (plain * without),
    }
