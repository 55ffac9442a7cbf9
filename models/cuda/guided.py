"""Guided rows of a device that works by itself: its layers do not wait to be told what the rows may say.

What a row may say follows from its token before, which the host has to see. So a step is launched without its choice
while the step before it runs. The choice is made when that one's tokens are known: the device has the layers to compute
meanwhile, which takes longer than to fill masks.
"""

import numpy as np
from torch import Tensor

from troupellm.models.cuda.choosing import Chooser
from troupellm.models.cuda.rows import DeviceRows
from troupellm.models.cuda.ticket import LaunchedPlan
from troupellm.models.guides.rows import GuidedRows


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
        filled = self._guides.begin(ticket.rows)
        masks = None if filled is None else self._guides.filled(filled)
        reasons = {} if masks is None else masks.reasons
        numbers = self._chooser.append(
            choice.logits, choice.columns, choice.kind, choice.slots, choice.ends, masks
        )  # fmt: skip
        kept = np.flatnonzero(self._rows.lengths[choice.slots] == choice.ends)
        slots = ticket.slots = choice.slots[kept]
        if kept.size < choice.slots.size:
            left = kept.tolist()
            ticket.kept = np.concatenate([kept + part for part in range(0, numbers.numel(), choice.slots.size)])
            ticket.rows = tuple(ticket.rows[place] for place in left)
            ticket.positions = tuple(ticket.positions[place] for place in left)
            ticket.sampling[np.delete(np.flatnonzero(ticket.sampling), kept)] = False
            reasons = {here: reasons[there] for here, there in enumerate(left) if there in reasons}
        ticket.reasons, ticket.described = reasons, self._chooser.described(slots)
        self._rows.advance(slots)
        return numbers
