"""Measures the number of tokens per step that keeps the device busy, once, during warm-up."""

from array import array
from collections.abc import Callable
from time import perf_counter

from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan

SIZES = (32, 128, 256, 512)
"""Tokens of the timed steps."""
LEAST_TOKENS = 128
"""The least number that is reported: below it, the fixed cost of a step outweighs the gain."""
GAIN = 1.07
"""Doubling a step's tokens must raise tokens per second by this factor to be worth it. The factor is small,
since short steps delay the last of several prompts that arrive together more than they speed up the first."""
AROUND = 0.002
"""Seconds. About the cost of a step outside the model: planning, transport to and from the worker, detokenization."""
SLOW = 0.25
"""Seconds. If a step takes longer, larger ones would delay the start, and running streams."""
TRIES = 3
"""Steps that are not slow, or may only have been held up, are timed so often, or until two times are alike, and the
quickest counts: on a machine that does something else besides, one slow try would hide what a larger step gains."""
ALIKE = 0.02
"""Share by which two times may differ to be the same."""


def measure(run: Callable[[int], object], most: int, *, clock: Callable[[], float] = perf_counter) -> tuple[int, float]:
    """The fewest tokens with which a step does nearly as many per second as with any more, and how long it takes.

    Args:
        run: executes a step with this many tokens of one prompt.
        most: tokens that a step can have, at least 1.

    Returns:
        tokens and seconds; 0.0 seconds where not even the smallest step fits.
    """
    tokens, seconds = LEAST_TOKENS, 0.0
    for size in SIZES:
        if size > most:
            break
        took = _timed(run, size, clock)
        for _ in range(1, TRIES if took < 2 * SLOW else 1):
            again = _timed(run, size, clock)
            alike = abs(again - took) < ALIKE * took
            took = min(took, again)
            if alike:
                break
        if size > LEAST_TOKENS and size / (took + AROUND) < GAIN * tokens / (seconds + AROUND):
            break
        tokens, seconds = max(size, LEAST_TOKENS), took * max(1.0, LEAST_TOKENS / size)
        if took > SLOW:
            break
    return tokens, seconds


def measure_runner(runner: ModelRunner, *, num_blocks: int, block_size: int, max_model_len: int) -> tuple[int, float]:
    """Run `measure` on a runner. Writes into the first blocks of the cache, which hold nothing yet.

    Args:
        runner: warmed up with row 0; nothing else is run on it.
    """
    step = 0

    def run(size: int) -> None:
        nonlocal step
        step += 1
        row = NewRow(
            row=step,
            epoch=0,
            request_id="",
            token_ids=array("i", bytes(4 * size)).tobytes(),
            num_prompt_tokens=size,
            state=0,
            sampling=SamplingState(temperature=0.0),
            blocks=(tuple(range(-(-size // block_size))),) * runner.rows.num_groups,
        )
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=(step,),
            epochs=(0,),
            starts=(0,),
            counts=(size,),
            new_rows=(row,),
            freed_rows=(step - 1,),
        )
        runner.run(plan)

    return measure(run, min(num_blocks * block_size, max_model_len))


def _timed(run: Callable[[int], object], size: int, clock: Callable[[], float]) -> float:
    begin = clock()
    run(size)
    return max(clock() - begin, 1e-9)
