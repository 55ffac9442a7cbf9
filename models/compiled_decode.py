"""Steps that are nothing but decoding, in one compiled call each."""

from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.decode_step import CacheShape, DecodeStep, Ends, decode_step
from troupellm.kernels.paged_attention.backends import Planner
from troupellm.models.decoder import Decoder, RunnableDecoder
from troupellm.models.kv_cache import KVCache
from troupellm.models.row_table import RowTable
from troupellm.models.sampler import Sampled, Sampler
from troupellm.models.step_result import step_result
from troupellm.protocol.worker import StepPlan, StepResult, StepTimings


class CompiledDecode:
    """Every row of such a step goes on from its last token, and asks for nothing but a draw from the whole vocabulary
    or the likeliest token."""

    def __init__(self, step: DecodeStep, rows: RowTable, sampler: Sampler) -> None:
        self._step, self._rows, self._sampler = step, rows, sampler
        self._ones: tuple[int, ...] = ()

    @property
    def logits(self) -> Tensor:
        """Of the last step, as its first rows [.., vocab]."""
        return self._step.logits

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan that was applied asks for such a step; `run` finds out about the rows' lengths.

        Raises:
            PlanError: an unknown row, or another epoch.
        """
        count = len(plan.rows)
        if len(self._ones) != count:
            self._ones = (1,) * count
        if not 0 < count <= self._step.most_rows or plan.counts != self._ones:
            return False
        self._rows.places(plan)
        return self._sampler.plain.slots(plan.rows) is not None

    def run(self, plan: StepPlan) -> StepResult | None:
        """Compute a plan that `takes` takes and append the tokens to their rows. None where some row does not go on
        from its last token, or contradicts what is known of it: nothing was computed then.
        """
        begin = perf_counter()
        slots, plain = self._rows.places(plan), self._sampler.plain
        options = plain.slots(plan.rows)
        assert options is not None
        tokens = self._step.run(self._rows.memory, plain.columns, slots, options, plan.starts)
        if tokens is None:
            return None
        timings = StepTimings(forward=perf_counter() - begin)
        if min(tokens) < 0:
            peaks = torch.from_numpy(self._step.peaks[: len(tokens)].copy())
            positions = tuple(start + 1 for start in plan.starts)
            sampled = Sampled(torch.tensor(tokens), plan.rows, positions, peaks, (), {}, {})
            return step_result(plan, sampled, np.ones(len(tokens), dtype=bool), (), timings)
        return StepResult(
            step=plan.step, engine_epoch=plan.engine_epoch, rows=plan.rows, epochs=plan.epochs,
            token_counts=plan.counts, tokens=tuple(tokens), timings=timings,
        )  # fmt: skip


def compiled_decode(
    decoder: RunnableDecoder, cache: KVCache, rows: RowTable, sampler: Sampler, attention: Planner
) -> CompiledDecode | None:
    """None where some part of the model, or of what it is served with, is computed by others."""
    if not isinstance(decoder, Decoder) or decoder.together is None or decoder.head is None:
        return None
    config = decoder.config
    if not attention.compiled or config.logit_scale != 1.0 or config.logit_softcap:
        return None
    ends = Ends(decoder.embedding, decoder.embedding_scale, decoder.norm, config.rms_norm_eps, decoder.head)
    views = [(view.group, view.window or 0) for view in cache.layout.views]
    shape = CacheShape(views, cache.num_kv_heads, cache.block_size, cache.num_blocks)
    step = decode_step(decoder.together, decoder.tables, cache.layers, ends, shape, sampler.codes)
    return None if step is None else CompiledDecode(step, rows, sampler)
