"""Verifies the drafts of a step: from its logits to its result."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.batch.row_drafts import RowDrafts
from troupellm.models.batch.row_table import RowTable
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.sampling.sampler import Sampler
from troupellm.models.speculation.speculator import Speculator
from troupellm.models.speculation.verify_batch import Verdict, VerifyBatch, kept_logprobs, row_errors
from troupellm.models.structured_outputs.fill_masks import FilledLater
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.protocol.messages.worker import RowError, RowLogprobs, RowPooled, StepPlan, StepResult, StepTimings


class Verification:
    """Draws the tokens of the virtual rows, keeps the drafts that equal them, and appends what is kept.

    Attributes:
        drawn: the number of each virtual row's row, in the order of the logits.
        verdict: by row of `verify_batch.spans`, after `sample`.
    """

    def __init__(
        self,
        plan: StepPlan,
        verify_batch: VerifyBatch,
        sampling: NDArray[np.bool_],
        rows: RowTable,
        sampler: Sampler,
        guides: GuidedRows | None,
        speculator: Speculator,
    ) -> None:
        """sampling: [rows of `verify_batch.spans`]."""
        self._plan, self.verify_batch, self._sampling, self._rows = plan, verify_batch, sampling, rows
        self._sampler, self._guides, self._speculator = sampler, guides, speculator
        self._numbers = [plan.rows[index] for index in verify_batch.spans.rows.tolist()]
        self._owner, self._positions, self._histories = verify_batch.histories(rows, sampling)
        self.drawn = [self._numbers[row] for row in self._owner]
        self.verdict: dict[int, Verdict] = {}
        self._errors: list[RowError] = []
        self._logprobs: list[RowLogprobs] = []
        self._finished: Sequence[int] = ()
        self._forced: dict[int, Sequence[int]] = {}

    def begin_masks(self) -> FilledLater | None:
        """Begin the masks of guided rows, at every draft."""
        if self._guides is None:
            return None
        drafts: dict[int, RowDrafts] = {self._numbers[row]: each for row, each in self.verify_batch.drafts.items()}
        return self._guides.begin(self.drawn, drafts)

    def sample(self, logits: Tensor | None, masks: TokenMasks | None) -> None:
        """Choose tokens, keep drafts.

        Args:
            logits: [virtual rows, vocab]; None where nothing samples.
        """
        verify_batch = self.verify_batch
        if logits is not None:
            sure = verify_batch.lengths[self._owner].tolist()
            sampled = self._sampler.sample(logits, self.drawn, self._positions, self._histories, masks, sure)
            verdict = self.verdict = verify_batch.verify(
                self._sampling, sampled.values, self._speculator.acceptance(self._plan, verify_batch)
            )
            self._guide()
            self._errors = row_errors(sampled, self._sampling, verdict, verify_batch)
            self._logprobs = kept_logprobs(sampled, self._sampling, verdict, verify_batch, self._numbers)
        self._speculator.finish(verify_batch, self.verdict)
        for row, forced in self._forced.items():
            self._rows.append_known(self._numbers[row], forced)

    def result(
        self,
        about_prompts: Sequence[RowLogprobs],
        pooled: Sequence[RowPooled],
        unsound: Sequence[RowError],
        timings: StepTimings,
    ) -> StepResult:
        """The result of all rows of the plan; those that computed nothing have no tokens. Arguments as of
        `step_result`."""
        size = len(self._plan.rows)
        counts, accepted, drafted = [0] * size, [0] * size, [0] * size
        tokens: list[int] = []
        places = self.verify_batch.spans.rows.tolist()
        for row, drafts in self.verify_batch.drafts.items():
            drafted[places[row]] = len(drafts)
        for row, kept in sorted(self.verdict.items()):
            said = [*kept.tokens, *self._forced.get(row, ())]
            counts[places[row]], accepted[places[row]] = len(said), kept.accepted
            tokens += said
        some = bool(self.verify_batch.drafts)
        return StepResult(
            step=self._plan.step,
            engine_epoch=self._plan.engine_epoch,
            rows=self._plan.rows,
            epochs=self._plan.epochs,
            token_counts=tuple(counts),
            tokens=tuple(tokens),
            accepted=tuple(accepted) if some else (),
            drafted=tuple(drafted) if some else (),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(about_prompts),
            pooled=tuple(pooled),
            errors=(*self._errors, *unsound),
            finished=tuple(self._finished),
            timings=timings,
        )

    def moves(self, block_size: int) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
        """Per cache group, which (block, place) are to be copied where, so that kept drafts of trees follow each
        other."""
        found = []
        for group in range(self._rows.num_groups):
            sources: list[tuple[int, int]] = []
            targets: list[tuple[int, int]] = []
            for row, kept in self.verdict.items():
                slot, length = int(self.verify_batch.spans.slots[row]), int(self.verify_batch.lengths[row])
                table = self._rows.blocks[group, slot]
                for depth, node in enumerate(kept.path):
                    if node != depth:
                        for places, at in ((sources, length + node), (targets, length + depth)):
                            places.append((int(table[at // block_size]), at % block_size))
            if sources:
                found.append((sources, targets))
        return found

    def _guide(self) -> None:
        """Give the guides the kept tokens; nothing follows a complete grammar."""
        if self._guides is None or not len(self._guides):
            return
        order = list(self.verdict)
        numbers = [self._numbers[row] for row in order]
        tokens = [self.verdict[row].tokens for row in order]
        ends = self.verify_batch.lengths[order] + [len(each) for each in tokens]
        advanced = self._guides.advance(numbers, tokens, (self._rows.longest - ends).tolist())
        self._finished = advanced.finished
        for row, number in zip(order, numbers, strict=True):
            if number in advanced.kept:
                self.verdict[row].cut(advanced.kept[number])
            if number in advanced.forced:
                self._forced[row] = advanced.forced[number]
