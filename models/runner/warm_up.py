"""Runs first steps, so that one-time work does not delay the first request."""

from time import perf_counter
from typing import Protocol

from troupellm.models.batch.row_table import RowTable
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.memory.plan import MemoryBudget
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.runner.saturation import LEAST_TOKENS, measure_runner
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan, StepResult
from troupellm.protocol.params.pooling import PoolingAbility, PoolingParams

BUSY_SECONDS = 0.2
"""If the first step of one token takes longer, the model is large or the machine busy: no others are timed then."""


class Runner(Protocol):
    """A runner of a decoder, on any device."""

    @property
    def rows(self) -> RowTable: ...
    @property
    def decoder(self) -> RunnableDecoder: ...
    def run(self, plan: StepPlan) -> StepResult: ...


def warmed(
    spare: ModelRunner, ability: PoolingAbility | None, config: EngineConfig, budget: MemoryBudget
) -> tuple[int, float]:
    """Run a first step on a CPU; from how many tokens on, and from what time, a step does no more of them per second.

    Args:
        spare: nothing else is run on it.
    """
    begin = perf_counter()
    first_step(spare, ability)
    quick = config.scheduler.max_num_prefill_tokens == "auto" and perf_counter() - begin < BUSY_SECONDS
    if not quick or spare.decoder.head is None:  # timed steps generate
        return LEAST_TOKENS, 0.0
    return measure_runner(
        spare, num_blocks=budget.num_blocks, block_size=config.cache.block_size, max_model_len=budget.max_model_len
    )


def first_step(runner: Runner, ability: PoolingAbility | None = None) -> None:
    """One token through the whole model."""
    block = NewRow(
        row=0,
        epoch=0,
        request_id="",
        token_ids=bytes(4),
        num_prompt_tokens=1,
        sampling=SamplingState(temperature=0.0),
        blocks=((0,),) * runner.rows.num_groups,
        state=0,
        pooling=None if runner.decoder.head is not None or ability is None else ability.resolve(PoolingParams()),
    )
    runner.run(StepPlan(step=0, engine_epoch=0, rows=(0,), epochs=(0,), starts=(0,), counts=(1,), new_rows=(block,)))
