"""The requests of an API process, whose places are in the engine's process."""

from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.waiter import Waiter, new_waiter


class NoSlot:
    """The place is taken up in the engine's process."""

    def tokenized(self, tokens: int) -> None: ...

    def scheduled(self) -> None: ...

    def leave(self) -> None: ...


class OpenRequest:
    """A request of an API process, from its application for a place to its end."""

    __slots__ = ("admitted", "answered", "invalid", "outbox", "prompt")

    def __init__(self, outbox: LocalOutbox) -> None:
        self.outbox = outbox
        self.prompt: tuple[int, ...] = ()
        self.admitted = False
        self.invalid = False
        self.answered: Waiter = new_waiter()
        """Woken once it is clear whether it gets a place."""
