"""After the worker has died: which of the requests that it worked on killed it.

The requests of the lost plans are suspects. They are computed again in groups, and while a group is on trial no other
request is computed. A group whose members get past the point where the worker died is cleared. If the worker dies
again, the members go on in halves, one after the other, until a request is on trial alone; one that kills the worker
then is blamed. Innocent halves come first in line, so if the worker itself is broken, no step succeeds.

A cleared request stays on parole for some tokens. If the worker dies over it again, it must get further past that point
each time: a request that kills the worker a little later at every attempt is found too.

A kill that may have come from outside proves less: see `suspect`.
"""

from collections import deque
from collections.abc import Iterable

from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.sequence import Request, Sequence

DEATHS_TO_BLAME = 2
"""A request that was alone at the first death may have had bad luck."""
PAROLE_TOKENS = 64
"""So far past the point of the last death nothing is held against a request any more."""
_MARGINS = (0, 0, 4, 16)
"""Tokens past the point of death that clear a suspect, by how often it was cleared on parole before."""


class _Suspect:
    """A request under suspicion, and the position that each of its accused sequences must get past."""

    __slots__ = ("deaths", "marks", "request", "times_cleared")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.marks: dict[Sequence, int] = {}
        self.deaths = 0
        """Since it was cleared."""
        self.times_cleared = 0

    @property
    def cleared(self) -> bool:
        return self._is_past(0)

    @property
    def free(self) -> bool:
        """Its parole is over."""
        return self._is_past(PAROLE_TOKENS)

    def accuse(self, sequence: Sequence) -> None:
        margin = _MARGINS[min(self.times_cleared, len(_MARGINS) - 1)]
        self.marks[sequence] = max(sequence.num_computed + margin, self.marks.get(sequence, 0))

    def _is_past(self, tokens: int) -> bool:
        marks = self.marks.items()
        return all(sequence.ended or sequence.num_confirmed >= mark + tokens for sequence, mark in marks)


class Quarantine:
    """`members` are the requests that may be computed now; None lets everybody."""

    def __init__(self) -> None:
        self.members: set[Request] | None = None
        self.num_blamed = 0
        self._steady = False
        """The members are those of the first trial since there is this worker."""
        self._renewed = False
        self._groups: deque[list[_Suspect]] = deque()
        self._paroled: dict[Request, _Suspect] = {}

    def __len__(self) -> int:
        """Requests under suspicion."""
        return sum(map(len, self._groups))

    def renew(self) -> None:
        """There is another worker, which has computed nothing yet."""
        self.members = None
        self._renewed = True

    def suspect(self, lost: Iterable[Sequence]) -> list[Request]:
        """As `accuse`, after a kill that looks as if it came from outside, but came too often.

        Accuses only requests that are not on trial yet, or the only group that this worker has computed. Convicts only
        a request that was alone with the worker from its first step.
        """
        if self.members is None:
            return self.accuse(lost, blame=False)
        return self.accuse(lost, blame=len(self.members) == 1) if self._steady else []

    def accuse(self, lost: Iterable[Sequence], *, blame: bool = True) -> list[Request]:
        """The worker has died of one of these sequences, still with the positions that were planned for them.

        Args:
            convict: if there is only one and it is its second death.

        Returns:
            the blamed requests.
        """
        self._paroled = {request: suspect for request, suspect in self._paroled.items() if not suspect.free}
        known = self._paroled | {suspect.request: suspect for group in self._groups for suspect in group}
        accused: dict[Request, _Suspect] = {}
        for sequence in lost:
            request = sequence.request
            accused.setdefault(request, known.get(request) or _Suspect(request)).accuse(sequence)
            self._paroled.pop(request, None)
        others = [[suspect for suspect in group if suspect.request not in accused] for group in self._groups]
        self._groups = deque(group for group in others if group)
        self.members = None
        for suspect in accused.values():
            suspect.deaths += 1
        suspects = list(accused.values())
        if len(suspects) > 1:
            half = (len(suspects) + 1) // 2
            self._groups.extend((suspects[:half], suspects[half:]))
        elif suspects and blame and suspects[0].deaths >= DEATHS_TO_BLAME:
            self.num_blamed += 1
            return [suspects[0].request]
        elif suspects:
            self._groups.append(suspects)
        return []

    def review(self) -> bool:
        """Clear the members that got far enough; True when another group is on trial now, or none.

        A member whose reader has stopped reading cannot go on: its own trial comes when it reads again.
        """
        changed = self._put_on_trial()
        self._steady = self._renewed or (self._steady and not changed)
        self._renewed = False
        return changed

    def _put_on_trial(self) -> bool:
        """Whether `members` has changed."""
        if not self._groups:
            changed, self.members = self.members is not None, None
            return changed
        before = self.members
        absent: list[list[_Suspect]] = []
        for group in self._groups:
            absent += [[suspect] for suspect in group if suspect.request.paused and not suspect.cleared]
        groups = [[suspect for suspect in group if not suspect.request.paused] for group in self._groups]
        for group in groups:
            if all(suspect.cleared for suspect in group):
                self._parole(group)
        groups = [group for group in groups if not all(suspect.cleared for suspect in group)]
        self._groups = deque([*groups, *absent])
        self.members = {suspect.request for suspect in groups[0]} if groups else None
        return self.members != before

    def _parole(self, group: list[_Suspect]) -> None:
        for suspect in group:
            suspect.deaths = 0
            suspect.times_cleared += 1
            self._paroled[suspect.request] = suspect
        self._paroled = {request: suspect for request, suspect in self._paroled.items() if not suspect.free}

    def first(self, waiting_queue: WaitingQueue) -> Sequence | None:
        """The member that is served next."""
        waiting = [
            sequence for request in self.members or () for sequence in request.sequences if sequence in waiting_queue
        ]
        return min(waiting, key=lambda sequence: sequence.arrival_key, default=None)
