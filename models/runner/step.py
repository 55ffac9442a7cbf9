"""One plan on its way through the stages of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.batch.spans import Spans
from troupellm.models.sampling.masks import Advanced
from troupellm.models.sampling.sampler import Sampled
from troupellm.models.speculation.verify import Verification
from troupellm.models.speculation.verify_batch import VerifyBatch
from troupellm.models.structured_outputs.fill_masks import FilledLater
from troupellm.protocol.messages.worker import RowLogprobs, StepPlan


@dataclass(slots=True)
class Step:
    """One plan on its way through the stages. Arrays are parallel to the rows of `spans`."""

    plan: StepPlan
    begin: float
    spans: Spans
    """The positions that are computed, drafts included; rows that compute nothing are not in it."""
    verify_batch: VerifyBatch | None
    """The drafts of the step. None: without a speculator, or in its sleep."""
    sampling: NDArray[np.bool_]
    """Rows that draw a token."""
    pooling: NDArray[np.bool_]
    """Rows whose vector is complete with this step."""
    check: Verification | None = None
    """Draws and keeps drafts. None: each row draws one token."""
    drawn: Sequence[int] = ()
    """The number of the row of each of the logits."""
    filled: FilledLater | None = None
    """Masks of guided rows, which other threads may be filling."""
    prepared: float = 0.0
    aux: list[Tensor] = field(default_factory=list)
    """Hidden states of the forward pass for the proposer, piece by piece."""
    about_prompts: list[RowLogprobs] = field(default_factory=list)
    computed: float = 0.0
    sampled: Sampled | None = None
    guided: Advanced | None = None
    """The guides' additions to the sampled tokens."""
