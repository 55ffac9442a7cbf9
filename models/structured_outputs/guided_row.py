"""One row's guide: its place in the grammar, and the error that stops it."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from troupellm.models.structured_outputs.after_thinking import Sleep, allows
from troupellm.models.structured_outputs.backend import MASK_SECONDS, BackendError, GuideError, Masks, Matcher
from troupellm.models.structured_outputs.matcher_cache import Built, GuideLibrary
from troupellm.protocol.errors import GUIDE_SPENT, INVALID_GUIDE, RequestFailed
from troupellm.protocol.messages.worker import RowError
from troupellm.protocol.params.guide import GuideProgram

LEAST_FORCED: Final = 2
"""The plan under way does not know of them and computes the first one alone, so that a single one saves no step."""
MOST_DEBT: Final = 0.1
"""CPU seconds beyond that which a row may be behind, before it ends: its masks hold up the whole batch."""
_DEAD_END = (
    "no token is left to choose from: what the guide of this output allows, allowed_token_ids, bad_words, min_tokens, "
    "logit_bias or others mask"
)
_FAILED = "the guide of this output cannot go on"
_MISFIT = "the output does not fit it"
_MISFITS = (_MISFIT, "doesn't satisfy the grammar")
"""Errors for tokens that masks had forbidden: no request's fault."""
_TOO_SLOW = "it is too ambiguous: its next tokens take too long to find"
_NOTHING: Final = (0, (), False, False)


class FilledAhead:
    """Masks that were filled together, before it was known which step their rows stand in."""

    __slots__ = ("__weakref__", "masks", "seconds")

    def __init__(self, masks: Masks, seconds: Sequence[float]) -> None:
        """seconds: CPU time of each; empty where it was not taken."""
        self.masks = masks
        self.seconds = seconds


class GuidedRow:
    """One row's guide."""

    __slots__ = (
        "_built", "_draft_debt", "_library", "_program", "_spent", "_stopped", "_token_ids", "ahead",
        "at_fault", "backend", "building", "debt", "error", "jumps", "matcher", "only", "sleep",
    )  # fmt: skip

    def __init__(self, library: GuideLibrary, program: GuideProgram, *, jumps: bool = False) -> None:
        """jumps: take tokens that must come next without drawing them."""
        self.jumps = jumps
        self.backend = program.backend
        self.building: Future[None] | None = None
        self.matcher: Matcher | None = None
        self.sleep: Sleep | None = None
        self.error: str | None = None
        self.at_fault = True
        """The request is to blame for the error."""
        self.only: int | None = None
        """The one token that may come next, where that is known."""
        self.ahead: tuple[FilledAhead, int] | None = None
        """Its next mask, where it was filled ahead: among which, and its place there."""
        self._library = library
        self._program = program
        self._built: Built | None = None
        self._token_ids: list[int] = []
        """The tokens that the matcher has."""
        self._spent = False
        """True after the limits that the program's matchers share are used up."""
        self._stopped: bool | None = None
        """`Matcher.stopped`; None: the matcher has moved since it was read."""
        self.debt = self._draft_debt = 0.0
        """CPU seconds that its masks have taken beyond their allowance."""

    @property
    def asleep(self) -> bool:
        return self.sleep is not None and not self.sleep.awake

    @property
    def stopped(self) -> bool:
        """Its grammar is complete."""
        if self._stopped is False:
            return False
        if self.error is not None or self.matcher is None or self.asleep:
            return False
        if self._stopped is None:
            self._stopped = self.matcher.stopped
        return self._stopped

    def _moved(self) -> None:
        """Forget the results that depend on the matcher's place."""
        self._stopped = self.only = self.ahead = None

    def failure(self, row: int) -> RowError:
        """The error to report if no token is left for the row."""
        text = _DEAD_END if self.error is None else f"{_FAILED}: {self.error}"
        if not self.at_fault:
            return RowError(row, text, RequestFailed.default_code)
        return RowError(row, f"{self._program.field}: {text}", GUIDE_SPENT if self._spent else INVALID_GUIDE)

    def build(self, token_ids: Sequence[int]) -> None:
        """Never raises."""
        try:
            self._built, self.matcher = self._library.start(self._program)
            if self._program.after:
                self.sleep = Sleep(self._library.mark(self._program))
            if token_ids:
                self.accept(token_ids)
        except GuideError as error:
            self.error = str(error)
            self.at_fault = not isinstance(error, BackendError)

    def advance(self, token_ids: Sequence[int], most: int) -> tuple[int, Sequence[int], bool, bool]:
        """Take in tokens that it has drawn, and those that must follow.

        Every guided row comes by here in every step, most with one token.

        Args:
            most: tokens that may follow.

        Returns:
            how many of the tokens count, up to the one that completes its grammar; those that follow, if there are
            enough of them to pay, which it has now; whether its grammar is complete; whether its next mask must be
            computed. Nothing for a row that could not go on before.
        """
        matcher: Matcher | None = self.matcher
        if matcher is None or self.error is not None or self.stopped:
            return _NOTHING
        taken = 1
        if len(token_ids) == 1 and (self.sleep is None or self.sleep.awake):
            matcher = self._take(matcher, token_ids)
        else:
            taken = self._take_each(token_ids)
            matcher = None if self.asleep or self.error is not None else self.matcher
        if matcher is None:
            return taken, (), False, False
        if self.stopped:
            return taken, (), True, False
        forced: Sequence[int] = matcher.forced() if self.jumps else ()
        if not forced:
            return taken, (), False, True
        following = self._follow_forced(forced, most)
        complete = self.stopped
        return taken, following, complete, not complete and self.only is None and self.error is None

    def _take_each(self, token_ids: Sequence[int]) -> int:
        """Take in tokens up to the one that completes its grammar; how many count."""
        for number, token_id in enumerate(token_ids, 1):
            self.accept((token_id,))
            if self.stopped:
                return number
        return len(token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in generated tokens."""
        if self.matcher is None or self.error is not None:
            return
        if self.sleep is not None and not self.sleep.awake:
            token_ids = token_ids[self.sleep.accept(token_ids) :]
        if token_ids and not self.stopped:
            self._take(self.matcher, token_ids)

    def _take(self, matcher: Matcher, token_ids: Sequence[int]) -> Matcher | None:
        """Give tokens to the matcher of an awake row. Returns the matcher that has them now; None: it cannot go on."""
        self._token_ids += token_ids
        self._stopped = self.only = self.ahead = None
        if matcher.accept(token_ids):
            return matcher
        self.check()
        self.error = self.error or _MISFIT
        self.at_fault = not any(text in self.error for text in _MISFITS)
        return None

    def _begin_anew(self) -> None:
        """Make a new matcher and give it the tokens so far. Nothing is compiled: this may be within a step."""
        assert self._built is not None
        self._moved()
        self.matcher = self._library.again(self._built)
        if self._token_ids:
            self.matcher.accept(self._token_ids)

    def charge(self, seconds: float) -> None:
        """Account the CPU time of a mask: a row whose masks repeatedly take too long cannot go on."""
        self.debt = max(0.0, self.debt + seconds - MASK_SECONDS)
        if self.debt > MOST_DEBT:
            self.error = self.error or _TOO_SLOW

    def charge_draft(self, seconds: float) -> None:
        """Account the CPU time of a mask behind a draft: a slow row continues without drafts."""
        self._draft_debt = max(0.0, self._draft_debt + seconds - MASK_SECONDS)

    @property
    def takes_drafts(self) -> bool:
        """Its masks behind drafts have not taken too long."""
        return self._draft_debt <= MOST_DEBT

    def check(self) -> bool:
        """True if it can go on."""
        if self.error is None and self.matcher is not None and self.matcher.error is not None:
            self.error = self.matcher.error
            if self.matcher.spent and self._built is not None:
                self._spent = True
                self._library.drop(self._built)  # the scheduler has it built again, beside the steps
        return self.error is None

    def _follow_forced(self, forced: Sequence[int], most: int) -> Sequence[int]:
        """Take some of the forced tokens, of which there is at least one; returns those that were taken."""
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
        """Take back this many drafts. An error among them is undone."""
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
        """Wait until it is built."""
        if self.building is not None:
            self.building.result()
            self.building = None
