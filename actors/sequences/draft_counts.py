"""Counts of drafted and accepted tokens, of one request and of all."""


class DraftCounts:
    """`steps` are those in which a sequence had drafts verified."""

    __slots__ = ("accepted", "drafted", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
