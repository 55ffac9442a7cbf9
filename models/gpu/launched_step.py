"""A launched plan, and its result as it becomes known."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.gpu.device import Event
from troupellm.models.gpu.host_transfer import Ints
from troupellm.models.gpu.logprobs import Group
from troupellm.protocol.messages.worker import RowError, StepPlan, StepResult, StepTimings


@dataclass(frozen=True, slots=True)
class Choice:
    """The open choice of tokens of a step whose layers are launched: its guides depend on the step before it."""

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
    """The rows that sample."""
    positions: tuple[int, ...]
    returned: Tensor | None
    """int64 [numbers] on the host, of the rows that sample: there when the step is done."""
    timings: StepTimings
    result: StepResult | None = None
    logprob_parts: tuple[Group, ...] = ()
    """The sampling rows that get log-probabilities, which `returned` contains."""
    choice: Choice | None = None
    """The choice of tokens, if it is still to be made."""
    kept: list[int] | None = None
    """Indices of the `rows` that sampled successfully; None is all."""
    slots: Ints | None = None
    """Slots of those rows, if guides must be given their tokens."""
    reasons: Mapping[int, RowError] = field(default_factory=dict)
    """The error of a row whose guide allows no token, by index among `rows`."""
    done: Event | None = None
    """The event after the step: before it, the step's blocks and its inputs are in use."""

    @property
    def guided(self) -> bool:
        """True if guides must be given the tokens of some rows."""
        return self.choice is not None or self.slots is not None

    @property
    def step(self) -> int:
        """The plan's step."""
        return self.plan.step
