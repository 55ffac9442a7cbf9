"""The states of an oracle: of each slot, the tokens that its state stands for."""

from troupellm.protocol.messages.copies import NO_STATE
from troupellm.protocol.messages.worker import StepPlan


class HeldStates:
    def __init__(self) -> None:
        self._tokens: dict[int, tuple[int, ...]] = {}

    def copy(self, plan: StepPlan) -> None:
        """Every source is read before any target is written."""
        targets = [copy.target for copy in plan.states]
        assert len(set(targets)) == len(targets), "two copies go to one state slot"
        read = [() if copy.source == NO_STATE else self._tokens[copy.source] for copy in plan.states]
        self._tokens |= dict(zip(targets, read, strict=True))

    def compute(self, slot: int, tokens: list[int], start: int, end: int) -> None:
        """A row computes a span of its tokens; nothing happens where the model has no states."""
        if slot != NO_STATE:
            assert self._tokens[slot] == tuple(tokens[:start]), "a state stands for other tokens"
            self._tokens[slot] = tuple(tokens[:end])
