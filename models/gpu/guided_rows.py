"""Guided rows on an asynchronous device: a step's layers run before it is known which tokens the rows may choose.

The tokens that a row may choose follow from its token before, which the host has to see. So a step is launched without
its choice while the step before it runs. The choice is made when that step's tokens are known. Filling masks takes less
time than the device needs for the layers meanwhile.
"""

import numpy as np
from torch import Tensor

from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.gpu.sample import Chooser
from troupellm.models.sampling.masks import Advanced
from troupellm.models.sampling.sampler import Sampled
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.report_tokens import report_tokens


class LateChoices:
    """Chooses for steps that were launched without."""

    def __init__(self, guides: GuidedRows, chooser: Chooser, rows: DeviceRows) -> None:
        self._guides, self._chooser, self._rows = guides, chooser, rows

    def make(self, ticket: LaunchedPlan) -> Tensor:
        """The numbers of a step as of `Chooser.append`, when the guides know of all tokens before it.

        Rows whose guides have forced tokens upon them since the launch know what they say: what is chosen for them
        does not count, and is overwritten with the next changes of rows.
        """
        choice, ticket.choice = ticket.choice, None
        assert choice is not None
        filled = self._guides.begin(ticket.rows)  # none where those that had guides have ended
        masks = None if filled is None else self._guides.filled(filled)
        numbers = self._chooser.append(choice.logits, choice.columns, choice.kind, choice.slots, choice.ends, masks)
        kept = np.flatnonzero(self._rows.lengths[choice.slots] == choice.ends)
        ticket.slots, ticket.reasons = choice.slots[kept], {} if masks is None else masks.reasons
        if kept.size < choice.slots.size:
            ticket.kept = kept.tolist()
            ticket.sampling[np.delete(np.flatnonzero(ticket.sampling), kept)] = False
        self._rows.advance(ticket.slots)
        return numbers

    def report_tokens(self, ticket: LaunchedPlan, found: Sampled) -> Advanced | None:
        """Give the guides a step's tokens, if some of its rows have a guide."""
        return (
            None if ticket.slots is None else report_tokens(self._guides, self._rows, found.rows, ticket.slots, found)
        )
