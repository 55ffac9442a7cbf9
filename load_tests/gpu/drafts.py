"""Verifying drafts: what a step of several tokens per sequence costs, and what it brings where some are kept."""

from typing import Any

from troupellm.load_tests.gpu.engine import CONTEXT, LARGE, STEPS, Models
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.roofline import BF16, SIZES, decode_seconds
from troupellm.load_tests.speculation.arms import Arms, Measured
from troupellm.load_tests.speculation.workloads import RANDOM_PROMPT, random_tokens

DRAFTS, BATCHES = 4, (1, 32)
KEPT_TOKENS = 3.0
"""Of a step and sequence, on average, one of the model's own among them."""
ANSWER, ROUNDS = 512, 3
LIMIT_SECONDS = 180.0


def _drafting(kept: float) -> dict[str, Any]:
    """Drafts that cost next to nothing, of which as many are kept as is wanted."""
    return {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "adaptive": False,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": kept,
    }


def verified(models: Models) -> Found:
    """G20: a step of five tokens per sequence over one of one token, by the worker's graphs alone; and an engine's
    answers with drafts over those without, where three tokens of a step are kept on average."""
    found, details, size = dict[str, float](), dict[str, Any](), SIZES[LARGE]
    for batch in BATCHES:
        one, step = _timed(models, batch)
        # All drafts are refused, so that plans can be written beforehand.
        several, several_step = _timed(models, batch, speculative_config=_drafting(1.0))
        least = decode_seconds(size, BF16, models.roof(), batch=batch, context=CONTEXT + STEPS / 2)
        found[f"verify, batch {batch}"] = several / one
        details[f"verify, batch {batch}"] = {
            "ms": several * 1e3,
            "one token ms": one * 1e3,
            "one token, roofline ms": least * 1e3,
            "worker ms": several_step * 1e3,
            "one token, worker ms": step * 1e3,
        }
    spent = models.run(lambda: _answers(models), LIMIT_SECONDS)
    without, with_drafts = spent.rates
    found["speed-up, batch 1"] = spent.ratio
    details["speed-up, batch 1"] = {
        "tokens/s": with_drafts,
        "without drafts tokens/s": without,
        "tokens kept": spent.acceptance_length,
        "step over one without": spent.step_ratio,
    }
    return found, details


def _timed(models: Models, batch: int, **more: Any) -> tuple[float, float]:
    """Seconds of the worker's graph, or of its step where it has none, and of its step."""
    with models.worker(LARGE, batch, CONTEXT + STEPS + 32, **more) as worker:
        worker.fill(batch, CONTEXT, STEPS + 2)
        step = worker.step_seconds(STEPS)
        return worker.graph_seconds(STEPS) or step, step


async def _answers(models: Models) -> Measured:
    own = models.serving(LARGE, 1, RANDOM_PROMPT + ANSWER + DRAFTS + 8)
    folder = own.pop("model")
    questions = random_tokens(1, ANSWER, SIZES[LARGE].vocab)
    drafting, longest = _drafting(KEPT_TOKENS), RANDOM_PROMPT + ANSWER
    async with Arms(folder, drafting, batch=1, longest=longest, threads=None, embedded=True, **own) as arms:
        return await arms.measure("random tokens", questions, rounds=ROUNDS)
