"""Runs steps of every kind and size before the first request, so that all shapes are compiled then."""

from array import array
from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from troupellm.kernels.quantized_linear.gpu import SCALED_MM_ROWS
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.memory.plan import MemoryBudget
from troupellm.models.runner.warm_up import first_step
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import LoadProgress, NewRow, ProgressSink, SamplingState, StepPlan
from troupellm.protocol.params.pooling import PoolingAbility

KINDS = (
    SamplingState(temperature=0.0),
    SamplingState(temperature=1.0),
    SamplingState(temperature=1.0, top_p=0.9),
    SamplingState(temperature=0.0, repetition_penalty=1.1, logprobs=0),
    # By the whole sampler, which draws by kernels of its own.
    SamplingState(temperature=1.0, logprobs=1, logprobs_mode="processed_logprobs"),
    SamplingState(temperature=1.0, top_p=0.9, logprobs=1, logprobs_mode="processed_logprobs"),
)
"""Ways to choose a token that have kernels of their own."""
MANY_PROMPTS = 65
"""From this number of rows on, a separate kernel divides them among programs (`triton_plan.ROWS_TOGETHER`)."""
TIMED = 2
"""Times that the largest step is run again; the quickest counts."""


def warmed(
    spare: CudaRunner,
    ability: PoolingAbility | None,
    config: EngineConfig,
    budget: MemoryBudget,
    progress: ProgressSink,
) -> tuple[int, float]:
    """Have everything compiled, for tiles of any number of rows and for every way to choose a token; then time a step.

    Args:
        spare: nothing else is run on it; it has no graphs.
        progress: hears of every step, each of which may compile for long.

    Returns:
        tokens and seconds of the largest step, however long the first one took. A GPU has none that were as good and
        smaller: it takes milliseconds for the largest one, of which launches are the less the more there is to do.
    """
    scheduler, size = config.scheduler, config.cache.block_size
    most = scheduler.max_num_batched_tokens
    longest = min(most, budget.num_blocks * size, budget.max_model_len)
    first_step(spare, ability)
    if spare.decoder.head is None:  # steps below generate
        return most, 0.0
    steps = Steps(spare, size)
    wanted = [([1], kind) for kind in KINDS]
    wanted += [([1] * rows, KINDS[0]) for rows in sizes(scheduler.max_num_seqs)]
    if min(scheduler.max_num_seqs, most // 2) >= MANY_PROMPTS and longest > 1:
        wanted.append(([2] * MANY_PROMPTS, KINDS[0]))
    wanted += [([tokens], KINDS[0]) for tokens in sizes(longest)]
    for number, (prompts, kind) in enumerate(wanted):
        progress(LoadProgress(phase="warm_up", done=number, total=len(wanted)))
        steps.run(prompts, kind)
    _mask_nothing(spare)
    return most, min(steps.run([longest]) for _ in range(TIMED)) * most / longest


@torch.inference_mode()
def _mask_nothing(spare: CudaRunner) -> None:
    """Compile the kernels that only the choice of a guided row needs."""
    width = spare.decoder.config.vocab_size
    logits = torch.zeros(1, width, device=spare.device.torch_device)
    spare.chooser.mask(logits, np.zeros(1, np.int64), np.full((1, -(-width // 32)), -1, np.int32))


class Steps:
    """Steps of made-up rows. They write into the first blocks of the cache, which hold nothing yet."""

    def __init__(self, runner: CudaRunner, block_size: int) -> None:
        """runner: knows row 0, if any."""
        self._runner, self._block_size = runner, block_size
        self._step, self._rows = 0, tuple[int, ...]((0,))

    def run(self, prompts: Sequence[int], kind: SamplingState = KINDS[0]) -> float:
        """Run one step of prompts of these lengths, all in the same blocks; returns its seconds."""
        self._step += 1
        freed_rows, self._rows = self._rows, tuple(range(len(prompts)))
        plan = StepPlan(
            step=self._step,
            engine_epoch=0,
            rows=self._rows,
            epochs=(self._step,) * len(prompts),
            starts=(0,) * len(prompts),
            counts=tuple(prompts),
            freed_rows=freed_rows,
            new_rows=tuple(self._row(row, tokens, kind) for row, tokens in enumerate(prompts)),
        )
        begin = perf_counter()
        self._runner.run(plan)
        return perf_counter() - begin

    def _row(self, row: int, tokens: int, kind: SamplingState) -> NewRow:
        blocks = tuple(range(-(-tokens // self._block_size)))
        return NewRow(
            row=row,
            epoch=self._step,
            request_id="",
            token_ids=array("i", bytes(4 * tokens)).tobytes(),
            num_prompt_tokens=tokens,
            sampling=kind,
            blocks=(blocks,) * self._runner.rows.num_groups,
        )


def sizes(most: int) -> list[int]:
    """Of steps, one for each kind of tile up to `most` rows. Those that tiles of 64 rows are for are not 64, where a
    library takes over from some kernels."""
    return sorted({*powers_of_two(most), min(most, SCALED_MM_ROWS - 1)})


def powers_of_two(most: int) -> list[int]:
    """The powers of two below `most`, and `most` itself."""
    return [1 << power for power in range((most - 1).bit_length())] + [most]
