"""How many tokens a step needs to keep the device busy: timed once, while the worker warms up."""

from array import array
from collections.abc import Callable
from time import perf_counter

from troupellm.models.runner import ModelRunner
from troupellm.protocol.worker import NewRow, SamplingState, StepPlan

SIZES = (32, 128, 256, 512)
"""Tokens of the timed steps."""
LEAST_TOKENS = 128
"""What is reported at least: smaller steps are not worth what comes with every one of them."""
GAIN = 1.07
"""Twice the tokens must do so many times as many per second to be worth a longer step: prompts that come together
should not pay for their early first tokens with the time to the last one."""
AROUND = 0.002
"""Seconds. About what a step takes beside the model: planning, the way to the worker and back, text for readers."""
SLOW = 0.25
"""Seconds. Where a step takes longer, larger ones would hold up the start, and running streams."""
TRIES = 3
"""Steps that are not slow, or may only have been held up, are timed so often, or until two times are alike, and the
quickest counts: on a machine that does something else besides, one slow try would hide what a larger step gains."""
ALIKE = 0.02
"""Share by which two times may differ to be the same."""


def measure(run: Callable[[int], object], most: int, *, clock: Callable[[], float] = perf_counter) -> tuple[int, float]:
    """The fewest tokens with which a step does nearly as many per second as with any more, and how long it takes.

    Args:
        run: executes a step of so many tokens of one prompt.
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
    """See `measure`. Writes into the first blocks of the cache, which nobody reads yet.

    Args:
        runner: warmed up with row 0; nothing else is run on it.
    """
    step = 0

    def run(size: int) -> None:
        nonlocal step
        step += 1
        row = NewRow(
            row=step, epoch=0, request_id="", token_ids=array("i", bytes(4 * size)).tobytes(), num_prompt_tokens=size,
            sampling=SamplingState(temperature=0.0),
            blocks=(tuple(range(-(-size // block_size))),) * runner.rows.num_groups,
        )  # fmt: skip
        plan = StepPlan(
            step=step, engine_epoch=0, rows=(step,), epochs=(0,), starts=(0,), counts=(size,), new_rows=(row,),
            retired=(step - 1,),
        )  # fmt: skip
        runner.run(plan)

    return measure(run, min(num_blocks * block_size, max_model_len))


def _timed(run: Callable[[int], object], size: int, clock: Callable[[], float]) -> float:
    begin = clock()
    run(size)
    return max(clock() - begin, 1e-9)
