"""Pause planning on request, immediately or after the open requests have finished."""

from collections.abc import Callable

from troupellm.actors.scheduler.kv_offload import Offload
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.plans import PlansInFlight
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.sequences.sequence import Request, State


class PauseControl:
    """`halted`: nothing is planned. `finishing`: what is here is planned until it has ended, newcomers are held back.

    A halt in force is never weakened: `halted` ends with `end` alone.
    Held back means as if their reader did not read: they have no blocks, can be aborted, and keep their deadline.
    """

    def __init__(
        self,
        open_requests: OpenRequests,
        running_set: RunningSet,
        plans_in_flight: PlansInFlight,
        offload: Offload | None,
    ) -> None:
        self._offload = offload
        self._unwritten: list[Callable[[], None]] = []
        self._open = open_requests
        self._running_set = running_set
        self._in_flight = plans_in_flight
        self._held: dict[int, None] = {}
        self._kept: frozenset[int] = frozenset()
        """Requests that were here when planning stopped at once."""
        self._waiting: list[Callable[[bool], None]] = []
        self.halted = False
        self.finishing = False
        self.asked = False
        """`review` has a waiting caller to answer, or may have."""

    def begin(self, settled: Callable[[bool], None], *, finish: bool) -> None:
        """See `PausePlanning`."""
        self.asked = True
        if not self.halted:
            self.finishing, self.halted = finish, not finish
            self._kept = frozenset(() if finish else self._open.requests)
        elif finish and not self._kept.isdisjoint(self._open.requests):
            settled(False)
            return
        self._waiting.append(settled)

    def hold_back(self, request: Request) -> None:
        """A newcomer, while requests that were here before it are to finish first."""
        self._held[request.number] = None
        request.paused = True
        for sequence in request.sequences:
            if sequence.state is State.WAITING:
                self._running_set.hold(sequence)

    def end(self) -> list[int]:
        """Go on; the requests that were held back."""
        if self.halted and self._offload is not None:
            self._offload.stood_still()
        self.halted = self.finishing = False
        held, self._held = list(self._held), {}
        self._report(settled=False)
        return held

    def write_out(self, written: Callable[[], None]) -> None:
        """See `WriteOut`."""
        self.asked = True
        self._unwritten.append(written)

    def review(self) -> None:
        """After anything may have ended: tell who waits for standstill, or for what goes to outer tiers."""
        if self._unwritten and (self._offload is None or not self._offload.pending):
            unwritten, self._unwritten = self._unwritten, []
            for written in unwritten:
                written()
        if self.finishing:
            self._held = {number: None for number in self._held if number in self._open.requests}
            if len(self._held) == len(self._open.requests):
                self.halted, self.finishing = True, False
        if self.halted and not len(self._in_flight):
            self._report(settled=True)
        self.asked = bool(self._unwritten) or self.finishing or self.halted

    def _report(self, *, settled: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(settled)
