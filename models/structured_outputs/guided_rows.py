"""The guided rows of a worker: each row's place in its grammar, and the tokens that may come next.

Masks for a step are filled on a separate thread while the model computes the step. For a handful of rows with a small
vocabulary it is quicker to fill them on the calling thread. With more rows, masks are begun as soon as their tokens are
drawn: most cores are idle until the next step is computed, unless steps use all of them. A mask depends only on the
row's own program and tokens.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from time import perf_counter, thread_time
from weakref import ReferenceType

import torch

from troupellm.models.batch.row_drafts import RowDrafts
from troupellm.models.sampling.masks import Advanced, TokenMasks
from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.fill_masks import FilledLater, Walk, fill_ahead
from troupellm.models.structured_outputs.guided_row import FilledAhead, GuidedRow
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import GuideProgram

ON_THE_SPOT_SECONDS = 150e-6
"""Filling that is expected to take no longer is not handed to another thread."""
CROWDED_SECONDS = 2e-3
"""The same, of CPU time, where the step's own threads have all cores: another one would only hold them up, and take the
interpreter from them for every mask. By the clock it would take as long again, and so stay where it is."""
LEAST_AHEAD = 5
"""Rows whose masks are worth another thread before they are wanted."""
KEPT_AHEAD = 4
"""Groups of masks filled ahead: a row that waits longer for its step would keep those of all others in memory."""
_SMOOTHING = 0.1
_building = attrgetter("building")


class GuidedRows:
    """Calls come from one thread. `library` and `helper` outlive it."""

    def __init__(
        self, library: GuideLibrary, helper: ThreadPoolExecutor, *, jumps: bool = True, crowded: bool = False
    ) -> None:
        """
        Args:
            jumps: take tokens that must come next without drawing them.
            crowded: no core is left for filling masks beside a step.
        """
        self._crowded = crowded
        self._library = library
        self._jumps = jumps
        self._helper = helper
        self._rows: dict[int, GuidedRow] = {}
        self._seconds_per_row = 0.0
        self._ahead: Future[list[ReferenceType[FilledAhead]]] | None = None
        """Masks that the helper thread is filling ahead: no other thread may use their matchers meanwhile."""
        self._kept: deque[ReferenceType[FilledAhead]] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        """True if the row has a guide."""
        return row in self._rows

    def add(self, row: int, state: SamplingState, token_ids: Sequence[int]) -> None:
        """Make a row known, or replace it; its guide is built on the helper thread.

        Args:
            state: of the row; it has a guide.
            token_ids: generated so far, without the prompt.
        """
        program = state.guide
        if program is None:
            raise ValueError(f"row {row} has no guide")
        guided = self._rows[row] = GuidedRow(self._library, program, jumps=self._jumps and _may_jump(state))
        guided.building = self._helper.submit(guided.build, token_ids)

    def drop(self, row: int) -> None:
        """Forget a row; an unknown one is fine."""
        self._rows.pop(row, None)

    def trim(self, row: int, drafts: RowDrafts) -> None:
        """Leave out the drafts of a row that its guide does not let pass."""
        guided = self._rows.get(row)
        if guided is None or not len(drafts):
            return
        self._settle()
        if (guided.building is not None and not guided.building.done()) or not guided.takes_drafts:
            drafts.keep(())
            return
        guided.wait()
        ahead, walk = guided.ahead, Walk(guided)
        drafts.keep([node for node in range(len(drafts)) if walk.to(drafts, node)])
        walk.back()
        guided.ahead = ahead  # it is where it was

    def begin(self, rows: Sequence[int], drafts: Mapping[int, RowDrafts] | None = None) -> FilledLater | None:
        """Start to fill the masks of those of the rows that have a guide; None when there are none.

        Args:
            drafts: by row. A row with drafts stands in `rows` once for itself and once for each of them, in a run.
        """
        if not self._rows:
            return None
        found = list(map(self._rows.get, rows))
        guided = [row for row in found if row is not None]
        if not guided:
            return None
        index: Sequence[int] = range(len(rows))
        numbers = rows
        if len(guided) < len(rows):
            index = [place for place, row in enumerate(found) if row is not None]
            numbers = [rows[place] for place in index]
        followed = {}
        if drafts:
            firsts = {number: place for place, number in reversed(list(enumerate(numbers)))}
            followed = {firsts[row]: drafts[row] for row in firsts if row in drafts}
        filled = FilledLater(index, numbers, guided, followed, thread_time if self._crowded else perf_counter)
        expected = self._seconds_per_row * len(guided)
        most = CROWDED_SECONDS if self._crowded else ON_THE_SPOT_SECONDS
        quick = 0.0 < expected < most and not any(map(_building, guided))
        if quick and (quick := self._ahead is None or self._ahead.done()):
            self._settle()
        filled.start(self._library, None if quick else self._helper)
        return filled

    def filled(self, filled: FilledLater) -> TokenMasks:
        """Wait for masks."""
        masks = filled.wait()
        per_row = filled.seconds / len(masks.index)
        self._seconds_per_row += (per_row - self._seconds_per_row) * (_SMOOTHING if self._seconds_per_row else 1.0)
        return masks

    def advance(self, rows: Sequence[int], token_ids: Iterable[Sequence[int]], room: Iterable[int]) -> Advanced:
        """Give the guided ones of the rows the tokens that each has drawn, perhaps none.

        Args:
            room: tokens that each row may have beyond them.
        """
        self._settle()
        ahead: list[GuidedRow] = []
        finished: list[int] = []
        forced: dict[int, Sequence[int]] = {}
        kept: dict[int, int] = {}
        for row, tokens, most in zip(rows, token_ids, room, strict=True):
            guided = self._rows.get(row)
            if guided is None or not tokens:
                continue
            taken, following, complete, wants_mask = guided.advance(tokens, most)
            if following:
                forced[row] = following
            if complete:
                finished.append(row)
                if taken < len(tokens):
                    kept[row] = taken
            elif wants_mask:
                ahead.append(guided)
        # Not while the helper builds a grammar: the quick fill would wait for it.
        if len(ahead) >= LEAST_AHEAD and not self._crowded and not any(map(_building, self._rows.values())):
            self._ahead = self._helper.submit(fill_ahead, self._library, ahead)
        return Advanced(finished, forced, kept)

    def _settle(self) -> None:
        """Wait for masks that are being filled ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        self._kept += ahead.result()
        while len(self._kept) > KEPT_AHEAD:
            old = self._kept.popleft()()
            if old is not None:
                for row in self._rows.values():
                    if row.ahead is not None and row.ahead[0] is old:
                        row.ahead = None


def _may_jump(state: SamplingState) -> bool:
    """False if forced tokens must be drawn: they would lack log-probabilities, and skip other masks of the sampler."""
    masked = state.bad_words or state.allowed_token_ids or state.processors or state.thinking
    return state.logprobs < 0 and not masked


class Guides:
    """A worker's resources for guides, independent of its rows: the library and the thread that fills masks."""

    def __init__(self, read_tokenizer: Callable[[], Tokenizer], vocab_width: int, *, jumps: bool = True) -> None:
        """
        Args:
            read_tokenizer: called when the first guide comes.
            jumps: take tokens that must come next without drawing them.
        """
        self._jumps = jumps
        cores = max(1, len(os.sched_getaffinity(0)) - 1)  # one is left to the thread that makes steps
        self._crowded = torch.get_num_threads() > cores == 1
        self._library = GuideLibrary(read_tokenizer, vocab_width, cores)
        self._helper = ThreadPoolExecutor(1, "troupellm-guides")

    def rows(self) -> GuidedRows:
        """The guided rows of a new runner."""
        return GuidedRows(self._library, self._helper, jumps=self._jumps, crowded=self._crowded)

    def prepare(self, program: GuideProgram) -> None:
        """Build a guide, so that the row that needs it finds it built. Never raises."""
        with contextlib.suppress(GuideError):  # the row reports the error
            self._library.matcher(program)
            if program.after:
                self._library.mark(program)

    def close(self) -> None:
        """End the thread; may be called twice."""
        self._helper.shutdown(wait=True, cancel_futures=True)
