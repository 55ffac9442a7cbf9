"""One row's guide: where it is in its grammar, and why it cannot go on."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from troupellm.models.guides.backend import BackendError, GuideError, Matcher
from troupellm.models.guides.library import Built, GuideLibrary
from troupellm.models.guides.thinking import Mask, Sleep, allows
from troupellm.protocol.errors import INVALID_GUIDE, RequestFailed
from troupellm.protocol.guide import GuideProgram
from troupellm.protocol.worker import RowError

LEAST_FORCED: Final = 2
"""The plan under way does not know of them and computes the first one alone, so that a single one saves no step."""
MASK_SECONDS: Final = 2e-3
"""CPU time that each mask of a row may take."""
MOST_DEBT: Final = 0.1
"""CPU seconds beyond that which a row may be behind, before it ends: its masks hold up the whole batch."""
_DEAD_END = (
    "no token is left to choose from: what the guide of this output allows, allowed_token_ids, bad_words, min_tokens, "
    "logit_bias or others mask"
)
_FAILED = "the guide of this output cannot go on"
_MISFIT = "the output does not fit it"
_MISFITS = (_MISFIT, "doesn't satisfy the grammar")
"""What masks had forbidden came all the same: no request's fault."""
_TOO_SLOW = "it is too ambiguous: its next tokens take too long to find"


class GuidedRow:
    """One row's guide."""

    __slots__ = (
        "_built", "_debt", "_draft_debt", "_library", "_program", "_retried", "_stopped", "_token_ids", "ahead",
        "at_fault", "building", "error", "jumps", "matcher", "only", "sleep",
    )  # fmt: skip

    def __init__(self, library: GuideLibrary, program: GuideProgram, *, jumps: bool = False) -> None:
        """jumps: take tokens that must come next without drawing them."""
        self.jumps = jumps
        self.building: Future[None] | None = None
        self.matcher: Matcher | None = None
        self.sleep: Sleep | None = None
        self.error: str | None = None
        self.at_fault = True
        """The request is to blame for the error."""
        self.only: int | None = None
        """The one token that may come next, where that is known."""
        self.ahead: tuple[Mask, float | None] | None = None
        """Its next mask, where it was filled ahead, and the CPU seconds that it took, where they were taken."""
        self._library = library
        self._program = program
        self._built: Built | None = None
        self._token_ids: list[int] = []
        """Those that the matcher has."""
        self._retried = False
        self._stopped: bool | None = None
        """Of the matcher; None: it has moved since it was asked."""
        self._debt = self._draft_debt = 0.0

    @property
    def backend(self) -> str:
        return self._program.backend

    @property
    def asleep(self) -> bool:
        return self.sleep is not None and not self.sleep.awake

    @property
    def stopped(self) -> bool:
        """Its grammar is complete."""
        if self.error is not None or self.matcher is None or self.asleep:
            return False
        if self._stopped is None:
            self._stopped = self.matcher.stopped
        return self._stopped

    def _moved(self) -> None:
        """Forget what was known of where the matcher was."""
        self._stopped = self.only = self.ahead = None

    @property
    def wants_mask(self) -> bool:
        """Its next mask must be computed, and is not known."""
        if self.error is not None or self.matcher is None or self.asleep or self.stopped:
            return False
        return self.only is None and self.ahead is None

    def failure(self, row: int) -> RowError:
        """What to say if no token is left for it."""
        text = _DEAD_END if self.error is None else f"{_FAILED}: {self.error}"
        if not self.at_fault:
            return RowError(row, text, RequestFailed.default_code)
        return RowError(row, f"{self._program.field}: {text}", INVALID_GUIDE)

    def build(self, token_ids: Sequence[int]) -> None:
        """Never raises."""
        try:
            self._built, self.matcher = self._library.start(self._program)
            if self._program.after:
                self.sleep = Sleep(self._library.mark(self._program.after))
            if token_ids:
                self.accept(token_ids)
        except GuideError as error:
            self.error = str(error)
            self.at_fault = not isinstance(error, BackendError)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in generated tokens."""
        if self.matcher is None or self.error is not None:
            return
        if self.sleep is not None and not self.sleep.awake:
            token_ids = token_ids[self.sleep.accept(token_ids) :]
        if not token_ids or self.stopped:
            return
        self._token_ids += token_ids
        self._moved()
        if not self.matcher.accept(token_ids) and not self.retry():
            self.check()
            self.error = self.error or _MISFIT
            self.at_fault = not any(text in self.error for text in _MISFITS)

    def retry(self) -> bool:
        """Begin anew, once: others may have used up what all matchers of the program share, which is built again.
        Whether there is a matcher that has all tokens now."""
        if self._retried or self._built is None or self.matcher is None or not self.matcher.spent:
            return False
        self._retried = True
        self._library.drop(self._built)
        return self._begin_anew()

    def _begin_anew(self) -> bool:
        """A new matcher with the tokens so far; whether they fit."""
        self._moved()
        try:
            self._built, self.matcher = self._library.start(self._program)
        except GuideError as error:
            self.error = str(error)
            return False
        return not self._token_ids or self.matcher.accept(self._token_ids)

    def charge(self, seconds: float) -> None:
        """A mask took so much CPU time: a row whose masks take too long again and again cannot go on."""
        self._debt = max(0.0, self._debt + seconds - MASK_SECONDS)
        if self._debt > MOST_DEBT:
            self.error = self.error or _TOO_SLOW

    def charge_draft(self, seconds: float) -> None:
        """A mask behind a draft took so much: such a row goes on, without drafts."""
        self._draft_debt = max(0.0, self._draft_debt + seconds - MASK_SECONDS)

    @property
    def takes_drafts(self) -> bool:
        """Its masks behind drafts have not taken too long."""
        return self._draft_debt <= MOST_DEBT

    def check(self) -> bool:
        """Whether it can go on."""
        if self.error is None and self.matcher is not None and self.matcher.error is not None:
            self.error = self.matcher.error
            if self.matcher.spent and self._built is not None:
                self._library.drop(self._built)
        return self.error is None

    def jump(self, most: int) -> list[int]:
        """Take the tokens that must come next, if there are enough of them to pay."""
        if self.matcher is None or self.error is not None or self.asleep or self.stopped:
            return []
        forced = self.matcher.forced()
        if not forced:
            return []
        self.only = forced[0]
        if min(len(forced), most) < LEAST_FORCED:
            return []
        forced = forced[:most]
        self.accept(forced)
        return forced if self.error is None else []

    def follow(self, token_id: int) -> bool:
        """Take in a draft, which `return_to` will take back; False, and nothing has changed, where it cannot come
        next."""
        if self.matcher is None or self.error is not None or self.matcher.error is not None or self.stopped:
            return False
        if self.asleep:
            assert self.sleep is not None
            if not allows(self.sleep.mask, token_id):
                return False
            self.sleep.accept((token_id,))
            return True
        if not self.matcher.fits(token_id) or not self.matcher.accept((token_id,)):
            if self.matcher.error is not None:
                self._begin_anew()
            return False
        self._moved()
        self._token_ids.append(token_id)
        return True

    def return_to(self, num_tokens: int) -> None:
        """Take back drafts, so many of them. What went wrong among them has not happened."""
        if self.matcher is not None and self.matcher.error is not None and self.error is None:
            guided = min(num_tokens, len(self._token_ids))
            if guided:
                del self._token_ids[-guided:]
            if self.sleep is not None and num_tokens > guided:
                self.sleep.rollback(num_tokens - guided)
            self._begin_anew()
        else:
            self.rollback(num_tokens)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted, beyond the mark too."""
        guided = min(num_tokens, len(self._token_ids))
        if self.matcher is not None and guided:
            self.matcher.rollback(guided)
            self._moved()
            del self._token_ids[-guided:]
        if self.sleep is not None and num_tokens > guided:
            self.sleep.rollback(num_tokens - guided)

    def wait(self) -> None:
        """Until it is built."""
        if self.building is not None:
            self.building.result()
            self.building = None
