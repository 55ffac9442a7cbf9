"""Guards a plug-in proposer: its failures cost drafts, and never fail a request."""

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.row_drafts import DraftError, Drafts, read_drafts
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES
from troupellm.models.proposers.base import Observation, ProposalBatch, Proposer
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.worker import NewRow

T = TypeVar("T")
logger = logging.getLogger("troupellm.worker")


class Guarded:
    """Calls a proposer until it fails for the first time, and drafts nothing from then on.

    Attributes:
        failed: it is not called any more.
    """

    def __init__(self, name: str, proposer: Proposer, vocab: int, *, trees: bool) -> None:
        """
        Args:
            name: for the log.
            vocab: width of the logits.
            trees: drafts may be trees on this device.
        """
        self._name, self._proposer, self._vocab, self._trees = name, proposer, vocab, trees
        self.aux_hidden_states, self.failed = proposer.aux_hidden_states, False

    def add_row(self, slot: int, new: NewRow) -> None:
        self._call(lambda: self._proposer.add_row(slot, new))

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        self._call(lambda: self._proposer.drop_row(slot, token_ids))

    def observe(self, seen: Observation) -> None:
        self._call(lambda: self._proposer.observe(seen))

    def reset(self) -> None:
        self._call(self._proposer.reset)

    def propose(self, batch: ProposalBatch) -> Drafts:
        found = self._call(lambda: self._checked(batch))
        size = batch.slots.size
        return found or Drafts(np.zeros((size, 1), dtype=np.int32), np.zeros(size, dtype=np.int64))

    def report(self) -> ProposerReport:
        return ProposerReport(failures=int(self.failed))

    def _checked(self, batch: ProposalBatch) -> Drafts:
        drafts = self._proposer.propose(batch)
        rows = read_drafts(drafts, batch.limits.tolist(), self._vocab)
        if not self._trees and any(row.parents is not None for row in rows):
            raise DraftError(
                "trees of drafts over latent attention are verified on the device cpu only: propose chains"
            )
        return drafts

    def _call(self, call: Callable[[], T]) -> T | None:
        if self.failed:
            return None
        try:
            return call()
        except Exception:  # a plug-in may raise anything
            self.failed, self.aux_hidden_states = True, NO_AUX_HIDDEN_STATES
            logger.exception(
                "the proposer %s has failed: nothing is drafted until the model is loaded again", self._name
            )
            return None
