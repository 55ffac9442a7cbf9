"""After the worker has died: which of the requests that it worked on killed it.

The requests of the lost plans are suspects. They are computed again in groups, and while a group is on trial nobody
else is computed. A group whose members get past the point where the worker died is cleared. If the worker dies again,
the members go on in halves, one after the other, until a request is on trial alone; one that kills the worker then is
convicted. Innocent halves come first in line, so whatever has sickened the worker itself never sees a step succeed.
"""

from collections import deque
from collections.abc import Iterable

from troupellm.actors.scheduler.policy import WaitingRoom
from troupellm.actors.scheduler.sequence import Request, Sequence

DEATHS_TO_CONVICT = 2
"""A request that was alone at the first death may have had bad luck."""


class _Suspect:
    """A request under suspicion, and the position that each of its accused sequences must get past."""

    __slots__ = ("deaths", "marks", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.marks: dict[Sequence, int] = {}
        self.deaths = 0

    @property
    def cleared(self) -> bool:
        return all(sequence.ended or sequence.num_confirmed >= mark for sequence, mark in self.marks.items())


class Quarantine:
    """`members` are the requests that may be computed now; None lets everybody."""

    def __init__(self) -> None:
        self.members: set[Request] | None = None
        self.num_convicted = 0
        self._groups: deque[list[_Suspect]] = deque()

    def __len__(self) -> int:
        """Requests under suspicion."""
        return sum(map(len, self._groups))

    def accuse(self, lost: Iterable[Sequence]) -> list[Request]:
        """The worker has died of one of these sequences, still with the positions that were planned for them.

        Returns:
            the convicted.
        """
        known = {suspect.request: suspect for group in self._groups for suspect in group}
        accused: dict[Request, _Suspect] = {}
        for sequence in lost:
            request = sequence.request
            suspect = accused.setdefault(request, known.get(request) or _Suspect(request))
            suspect.marks[sequence] = max(sequence.num_computed, suspect.marks.get(sequence, 0))
        others = [[suspect for suspect in group if suspect.request not in accused] for group in self._groups]
        self._groups = deque(group for group in others if group)
        self.members = None
        for suspect in accused.values():
            suspect.deaths += 1
        suspects = list(accused.values())
        if len(suspects) > 1:
            half = (len(suspects) + 1) // 2
            self._groups.extend((suspects[:half], suspects[half:]))
        elif suspects and suspects[0].deaths >= DEATHS_TO_CONVICT:
            self.num_convicted += 1
            return [suspects[0].request]
        elif suspects:
            self._groups.append(suspects)
        return []

    def review(self) -> bool:
        """Clear whom there is nothing against any more; True when another group is on trial now, or none.

        A member whose reader has stopped reading cannot go on: its own trial comes when it reads again.
        """
        if not self._groups:
            changed, self.members = self.members is not None, None
            return changed
        before = self.members
        absent: list[list[_Suspect]] = []
        for group in self._groups:
            absent += [[suspect] for suspect in group if suspect.request.paused and not suspect.cleared]
        groups = [[suspect for suspect in group if not suspect.request.paused] for group in self._groups]
        groups = [group for group in groups if not all(suspect.cleared for suspect in group)]
        self._groups = deque([*groups, *absent])
        self.members = {suspect.request for suspect in groups[0]} if groups else None
        return self.members != before

    def first(self, room: WaitingRoom) -> Sequence | None:
        """The member that is served next."""
        waiting = [sequence for request in self.members or () for sequence in request.sequences if sequence in room]
        return min(waiting, key=lambda sequence: sequence.arrival_key, default=None)
