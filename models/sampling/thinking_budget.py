"""A thinking budget: follows the tokens of one row, and names the tokens that must come when the budget is used up."""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from torch import Tensor

from troupellm.protocol.messages.worker import ThinkingState


class ThinkingWatch:
    """A pure function of a row's tokens: the same tokens give the same result, also in a replay after preemption.

    Attributes:
        seen: number of positions of the sequence that were fed; begins with the prompt's length.
    """

    def __init__(self, state: ThinkingState, prompt: Tensor) -> None:
        """prompt: token ids, [prompt]."""
        self.seen = prompt.numel()
        self._budget = state.budget
        self._starts = [list(mark) for mark in state.starts if mark]
        self._ends = [list(mark) for mark in state.ends if mark]
        self._forced = self._ends[0]
        longest = max(map(len, (*self._starts, *self._ends)))
        self._recent: deque[int] = deque(prompt[-longest:].tolist(), maxlen=longest)
        self.thinking = _ends_inside(prompt, self._starts, self._ends) if state.open is None else state.open
        self._used = 0
        self._next = 0
        """Index of the end mark's token that is forced next."""

    def feed(self, tokens: Iterable[int]) -> None:
        """Take the tokens that follow those it has seen."""
        for token in tokens:
            self.seen += 1
            self._recent.append(token)
            if not self.thinking:
                self.thinking = self._says(self._starts)
                continue
            if self._used >= self._budget:
                self._next = min(self._next + 1, len(self._forced) - 1)
            self._used += 1
            if self._says(self._ends):
                self.thinking, self._forced, self._next = False, self._ends[0], 0
            elif self._used == self._budget:
                self._forced, self._next = self._begun()

    def copy(self) -> "ThinkingWatch":
        """Another one that has seen the same."""
        other = copy(self)
        other._recent = self._recent.copy()
        return other

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None when any may."""
        return self._forced[self._next] if self.thinking and self._used >= self._budget else None

    def _begun(self) -> tuple[list[int], int]:
        """The end mark that the model is writing itself, to be written to its end, and how much of it is there."""
        recent = list(self._recent)[-self._used :] if self._used else []
        best = self._ends[0], 0
        for mark in self._ends:
            for length in range(min(len(mark) - 1, len(recent)), best[1], -1):
                if recent[-length:] == mark[:length]:
                    best = mark, length
                    break
        return best

    def _says(self, marks: Sequence[Sequence[int]]) -> bool:
        recent = list(self._recent)
        return any(recent[-len(mark) :] == mark for mark in marks)


def _ends_inside(prompt: Tensor, starts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> bool:
    """True if the last mark in a prompt begins thinking."""
    text = prompt.numpy().astype(np.int32).tobytes()
    return max((_last(text, mark) for mark in starts), default=-1) > max(
        (_last(text, mark) for mark in ends), default=-1
    )


def _last(text: bytes, mark: Sequence[int]) -> int:
    """The offset in bytes at which the last occurrence ends; -1 if there is none."""
    wanted, end = np.array(mark, dtype=np.int32).tobytes(), len(text)
    while (place := text.rfind(wanted, 0, end)) >= 0:
        if place % 4 == 0:
            return place + len(wanted)
        end = place + len(wanted) - 1  # not at a token's border
    return -1
