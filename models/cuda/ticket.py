"""A plan that was launched, and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.cuda.described import Group
from troupellm.models.cuda.device import Event
from troupellm.models.cuda.staging import Ints
from troupellm.protocol.worker import RowError, StepPlan, StepResult, StepTimings


@dataclass(frozen=True, slots=True)
class Choice:
    """What is left of a step whose layers are launched: what its rows may say follows from the step before it."""

    logits: Tensor
    """float32 [rows, vocab], of the rows that sample."""
    columns: Tensor
    """int64 [columns.WIDTH, rows], on the device."""
    kind: int
    """The most that any of the rows needs, as for `columns.choose`."""
    slots: Ints
    ends: Ints
    """Tokens that each of the rows had when it was launched."""


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
    described: tuple[Group, ...] = ()
    """Which of the rows that sample are told log-probabilities by what is returned."""
    choice: Choice | None = None
    """Still to be made."""
    kept: list[int] | None = None
    """Which of `rows` have sampled after all; None is all."""
    slots: Ints | None = None
    """Of those, where guides are told."""
    reasons: Mapping[int, RowError] = field(default_factory=dict)
    """By index among `rows`: what to say where a guide has left no token."""
    done: Event | None = None
    """The place behind the step: until the device is there, its blocks and what was sent for it are in use."""

    @property
    def guided(self) -> bool:
        """Guides are to be told what some of the rows say."""
        return self.choice is not None or self.slots is not None

    @property
    def step(self) -> int:
        """As of the plan."""
        return self.plan.step
