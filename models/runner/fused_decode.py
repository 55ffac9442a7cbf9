"""Runs a step in which every row decodes one token as a single compiled call."""

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.fused_decoder.step import DecodeStep, Ends, decode_step
from troupellm.models.batch.step_result import step_result
from troupellm.models.layers.decoder import Decoder
from troupellm.models.sampling.sampler import Sampled
from troupellm.protocol.messages.worker import StepPlan, StepResult, StepTimings

if TYPE_CHECKING:
    from troupellm.models.runner.runner import ModelRunner


class CompiledDecode:
    """Every row of such a step goes on from its last token, and asks for nothing but a draw from the whole vocabulary
    or the likeliest token."""

    def __init__(self, step: DecodeStep, runner: "ModelRunner") -> None:
        self._step, self._rows, self._sampler = step, runner.rows, runner.sampler
        self._pooler, self._guides = runner.pooler, runner.guides
        self._ones: tuple[int, ...] = ()

    @property
    def logits(self) -> Tensor:
        """The logits of the last step, as the first rows [.., vocab]."""
        return self._step.logits

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult | None:
        """Compute a plan that was applied and append the tokens to their rows. None where it asks for another kind of
        step, or contradicts what is known: nothing was computed then.

        Args:
            meanwhile: as of `ModelRunner.run`.

        Raises:
            PlanError: an unknown row, or another epoch.
        """
        if not self._takes(plan):
            return None
        slots, plain = self._rows.places(plan), self._sampler.plain
        options = plain.slots(plan.rows)
        if options is None:
            return None
        if meanwhile is not None:
            meanwhile()
        begin = perf_counter()
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
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=plan.counts,
            tokens=tuple(tokens),
            timings=timings,
        )

    def _takes(self, plan: StepPlan) -> bool:
        """True if each row has one token, and none needs embeddings, prompt log-probabilities, pooling or a guide."""
        if (
            self._rows.embeddings
            or self._rows.wants_prompt_logprobs
            or len(self._pooler)
            or (self._guides and len(self._guides))
        ):
            return False
        count = len(plan.rows)
        if len(self._ones) != count:
            self._ones = (1,) * count
        return count <= self._step.most_rows and plan.counts == self._ones


def compiled_decode(runner: "ModelRunner") -> CompiledDecode | None:
    """None if some part of the model, or of a step, has no compiled form."""
    decoder, cache = runner.decoder, runner.cache
    if not isinstance(decoder, Decoder) or decoder.together is None or decoder.head is None:
        return None
    config = decoder.config
    if not runner.attention.compiled or config.logit_scale != 1.0 or config.logit_softcap:
        return None
    ends = Ends(decoder.embedding, decoder.embedding_scale, decoder.norm, config.rms_norm_eps, decoder.head)
    views = [(view.group, view.window or 0) for view in cache.layout.views]
    step = decode_step(decoder.together, decoder.tables, cache.layers, ends, views, runner.sampler.codes)
    return None if step is None else CompiledDecode(step, runner)
