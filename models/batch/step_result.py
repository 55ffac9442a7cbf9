"""Builds the result of a step as plain data; holds the token histories that samplers look back at."""

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.sampling.masks import Advanced
from troupellm.models.sampling.sampler import Sampled
from troupellm.protocol.messages.worker import RowError, RowLogprobs, RowPooled, StepPlan, StepResult, StepTimings


class Histories(Sequence[Tensor]):
    """The tokens of each sampled row; a view is made only for a row whose options look at it."""

    def __init__(self, tokens: Tensor, slots: list[int], lengths: list[int]) -> None:
        self._tokens, self._slots, self._lengths = tokens, slots, lengths

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return self._tokens[self._slots[index], : self._lengths[index]]


def step_result(
    plan: StepPlan,
    sampled: Sampled | None,
    sampling: NDArray[np.bool_],
    about_prompts: tuple[RowLogprobs, ...],
    timings: StepTimings,
    pooled: Sequence[RowPooled] = (),
    unsound: Sequence[RowError] = (),
    guided: Advanced | None = None,
) -> StepResult:
    """
    Args:
        unsound: rows whose vector is not fit to be shown.
        guided: the guides' additions to the sampled tokens.
    """
    counts = sampling.astype(np.int64)
    tokens: list[int] = []
    errors: list[RowError] = []
    if sampled is not None:
        values, errors = sampled.values, sampled.errors
        tokens = values
        if errors:
            tokens = [token for token in values if token >= 0]
            counts[np.flatnonzero(sampling)[[token < 0 for token in values]]] = 0
        if guided is not None and guided.forced:
            tokens = _with_forced(plan, counts, tokens, guided)
    return StepResult(
        step=plan.step,
        engine_epoch=plan.engine_epoch,
        rows=plan.rows,
        epochs=plan.epochs,
        token_counts=tuple(counts.tolist()),
        tokens=tuple(tokens),
        logprobs=tuple(sampled.logprobs) if sampled is not None else (),
        prompt_logprobs=about_prompts,
        pooled=tuple(pooled),
        errors=(*errors, *unsound),
        finished=() if guided is None else tuple(guided.finished),
        timings=timings,
    )


def _with_forced(plan: StepPlan, counts: NDArray[np.int64], sampled: list[int], guided: Advanced) -> list[int]:
    """Each row's sampled token and those that must follow it; `counts` grows with them."""
    tokens: list[int] = []
    left = iter(sampled)
    for index in np.flatnonzero(counts).tolist():
        forced = guided.forced.get(plan.rows[index], ())
        tokens.append(next(left))
        if forced:
            tokens += forced
            counts[index] += len(forced)
    return tokens
