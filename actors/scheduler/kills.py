"""Kills from outside that meet the same request again and again, before it gets anywhere.

A kill from outside is usually independent of the requests. But where the kernel's count of out-of-memory kills cannot
be read, a request that needs too much memory looks like a kill from outside each time.
"""

from collections.abc import Sequence as Sequences

from troupellm.actors.sequences.sequence import Request, Sequence

KILLS_TO_SUSPECT = 8
"""In a row. Fewer than the losses without a finished step that end the engine, by those that a trial takes."""


class Kills:
    """Counts, for each request, the kills in a row that met it with no finished step of it in between."""

    def __init__(self) -> None:
        self._met: dict[Request, int] = {}

    def add(self, lost: Sequences[Sequence]) -> bool:
        """One more, which met these, as the lost worker had them; True when one of them was met too often."""
        going_on = {sequence.request for sequence in lost if sequence.num_confirmed}
        met = dict.fromkeys(sequence.request for sequence in lost if sequence.request not in going_on)
        self._met = {
            request: kills
            for request, kills in self._met.items()
            if request not in going_on and not all(sequence.ended for sequence in request.sequences)
        }
        for request in met:
            self._met[request] = self._met.get(request, 0) + 1
        return any(self._met[request] >= KILLS_TO_SUSPECT for request in met)
