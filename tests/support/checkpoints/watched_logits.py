"""The logits of a runner's steps, however they are computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.messages.worker import StepPlan, StepResult


@contextmanager
def watched_logits(runner: ModelRunner) -> Iterator[list[torch.Tensor]]:
    """Gets [rows, vocab] of every step inside, before anything is sampled from them."""
    seen: list[torch.Tensor] = []
    decoder, decode = runner.decoder, runner.decode
    in_parts, in_one_call = decoder.logits, None if decode is None else decode.run

    def recorded(hidden: torch.Tensor, **more: Any) -> torch.Tensor:
        found = in_parts(hidden, **more)
        seen.append(found.clone())
        return found

    def run(plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult | None:
        assert decode is not None
        assert in_one_call is not None
        result = in_one_call(plan, meanwhile)
        if result is not None:
            seen.append(decode.logits[: len(plan.rows)].clone())
        return result

    decoder.logits = recorded  # type: ignore[method-assign]
    if decode is not None:
        decode.run = run  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del decoder.logits
        if decode is not None:
            del decode.run
