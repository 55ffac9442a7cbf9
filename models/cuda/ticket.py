"""A plan that was launched, and what became of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.cuda.device import Event
from troupellm.protocol.worker import StepPlan, StepResult, StepTimings


@dataclass(slots=True)
class LaunchedPlan:
    """A ticket: a step that the device computes, or one that is done."""

    plan: StepPlan
    sampling: NDArray[np.bool_]
    rows: tuple[int, ...]
    """Those that sample."""
    positions: tuple[int, ...]
    returned: Tensor | None
    """int64 [numbers] on the host, of the rows that sample: there when the step is done."""
    timings: StepTimings
    result: StepResult | None = None
    described: tuple[int, ...] = ()
    """Which of the rows that sample are told their token's log-probability by what is returned."""
    done: Event | None = None
    """The place behind the step: until the device is there, its blocks and what was sent for it are in use."""

    @property
    def step(self) -> int:
        """As of the plan."""
        return self.plan.step
