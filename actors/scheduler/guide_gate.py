"""Guided sequences wait outside the batch until the worker has built their guides: no step ever builds one.

The worker keeps the programs that it built or started a row with last. The gate keeps half as many in the same order.
A program that sequences wait to start with is not dropped meanwhile, but it counts as built no longer once the worker
has built so many others that it may have dropped it. A lost worker has none of them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

from troupellm.actors.scheduler.build_queue import (
    MOST_OPEN,
    MOST_OPEN_BYTES,
    BuildQueue,
    ProgramKey,
    program_key,
)
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.sequences.sequence import Sequence, State
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.messages.guide import BuildGuide
from troupellm.protocol.messages.scheduler import GuideBuilt
from troupellm.protocol.messages.worker import NewRow
from troupellm.protocol.params.guide import MOST_PROGRAMS, MOST_TEXT_BYTES, GuideProgram

MOST_READY: Final = MOST_PROGRAMS // 2
MOST_READY_BYTES: Final = MOST_TEXT_BYTES // 2
_MOST_SINCE: Final = MOST_PROGRAMS - MOST_READY - MOST_OPEN
"""Programs that the worker may build until one that it was given before them counts as dropped. Meanwhile it may start
rows with all others that are ready, and build all that are open."""
_MOST_BYTES_SINCE: Final = MOST_TEXT_BYTES - MOST_READY_BYTES - MOST_OPEN_BYTES

_LATE = "the model worker took too long to build the guide of this output"
_Rows = dict[int, Sequence]


class _Built(NamedTuple):
    """The programs that the worker has built so far."""

    programs: int
    num_bytes: int


class GuideGate:
    """Holds sequences without blocks, as if their reader did not read, until their guide is built."""

    def __init__(self, running_set: RunningSet, open_requests: OpenRequests) -> None:
        self._running_set = running_set
        self._open = open_requests
        open_requests.on_end = self._drop
        self._built = _Built(0, 0)
        self._ready: OrderedDict[ProgramKey, _Built] = OrderedDict()
        """Least recently used first, with what had been built when it was used."""
        self._ready_bytes = 0
        self._waiting: dict[ProgramKey, _Rows] = {}
        """By row; no entry is empty."""
        self._starting: dict[ProgramKey, _Rows] = {}
        """Sequences whose guide was built and that have not started with it yet, as far as is known."""
        self._queue = BuildQueue()
        self._asked: dict[ProgramKey, str] = {}
        """Tenants of the programs that the worker was asked for."""
        self._urgent: list[BuildGuide] = []

    @property
    def held(self) -> list[Sequence]:
        """Sequences that wait for nothing but their guide."""
        every = [sequence for waiting in self._waiting.values() for sequence in waiting.values()]
        return [sequence for sequence in every if sequence.state is State.HELD and not sequence.request.paused]

    @property
    def num_held(self) -> int:
        return len(self.held) if self._waiting else 0

    def lacks(self, sequence: Sequence) -> bool:
        """Whether the worker must build a sequence's guide before it is admitted."""
        program = sequence.sampling.guide
        if program is None:
            return False
        used = self._ready.get(program_key(program))
        if used is None:
            return True
        others, num_bytes = self._built.programs - used.programs, self._built.num_bytes - used.num_bytes
        return others > _MOST_SINCE or num_bytes > _MOST_BYTES_SINCE

    def hold(self, sequence: Sequence, *, urgent: bool = False) -> None:
        """Move a sequence out of the waiting queue and have its guide built, once per program.

        Args:
            urgent: sequences that are ready to start wait for this one, so their programs leave no room for it.
        """
        program = sequence.sampling.guide
        assert program is not None
        self._running_set.hold(sequence)
        key, tenant = program_key(program), sequence.request.tenant
        self._starting.get(key, {}).pop(sequence.row, None)
        self._waiting.setdefault(key, {})[sequence.row] = sequence
        if key in self._asked:
            return
        if urgent:
            self._queue.remove(tenant, key)
            self._ask_now(program, tenant)
        else:
            self._queue.add(tenant, program)

    def take_asks(self) -> list[BuildGuide]:
        """The programs to build that were not asked for yet, as far as the worker has room for them."""
        urgent, self._urgent = self._urgent, []
        asks = self._queue.take(self._starters() | self._asked)
        self._asked |= {program_key(ask.program): ask.tenant for ask in asks}
        return urgent + asks

    def answer(self, built: GuideBuilt) -> None:
        """The sequences that waited go back to the waiting queue, or end where the worker took too long."""
        key = program_key(built.program)
        self._asked.pop(key, None)
        if built.outcome == "lost":
            for sequence in islice(self._waiting.get(key, {}).values(), 1):
                self._ask_now(built.program, sequence.request.tenant)
            return
        if built.outcome == "built":
            self._keep(key)
        for sequence in self._waiting.pop(key, {}).values():
            if sequence.ended:
                continue
            if built.outcome == "late":
                self._open.end_request(sequence.request, EngineStopped(_LATE, code="server_is_overloaded"))
            elif sequence.state is State.HELD and not sequence.request.paused:
                self._starting.setdefault(key, {})[sequence.row] = sequence
                self._running_set.let_go(sequence)

    def started(self, rows: Iterable[NewRow]) -> None:
        """A plan makes rows known to the worker, which uses their programs now."""
        for row in rows:
            if row.sampling.guide is None:
                continue
            key = program_key(row.sampling.guide)
            self._starting.get(key, {}).pop(row.row, None)
            if key in self._ready:
                self._ready[key] = self._built
                self._ready.move_to_end(key)

    def rebuild(self, sequence: Sequence) -> None:
        """The worker has dropped the program of a sequence that goes on: it must be built again."""
        assert sequence.sampling.guide is not None
        key = program_key(sequence.sampling.guide)
        if self._ready.pop(key, None) is not None:
            self._ready_bytes -= len(key[1])

    def _starters(self) -> dict[ProgramKey, str]:
        """Tenants of the programs with which sequences are about to start."""
        found: dict[ProgramKey, str] = {}
        for key, rows in list(self._starting.items()):
            for row, sequence in list(rows.items()):
                if _about_to_start(sequence):
                    found[key] = sequence.request.tenant
                    break
                del rows[row]
            if not rows:
                del self._starting[key]
        return found

    def _keep(self, key: ProgramKey) -> None:
        self._built = _Built(self._built.programs + 1, self._built.num_bytes + len(key[1]))
        if key not in self._ready:
            self._ready_bytes += len(key[1])
        self._ready[key] = self._built
        self._ready.move_to_end(key)
        kept = self._starters().keys() | {key}
        others = iter([other for other in self._ready if other not in kept])
        while len(self._ready) > MOST_READY or self._ready_bytes > MOST_READY_BYTES:
            other = next(others, None)
            if other is None:
                return
            del self._ready[other]
            self._ready_bytes -= len(other[1])

    def _drop(self, sequence: Sequence) -> None:
        """A sequence has ended. If no other sequence waits for its guide, the guide is not built, unless the worker was
        asked already."""
        program = sequence.sampling.guide
        if program is None:
            return
        key = program_key(program)
        self._starting.get(key, {}).pop(sequence.row, None)
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        waiting.pop(sequence.row, None)
        if not waiting:
            del self._waiting[key]
            self._queue.remove(sequence.request.tenant, key)

    def _ask_now(self, program: GuideProgram, tenant: str) -> None:
        """However many programs are open."""
        self._asked[program_key(program)] = tenant
        self._urgent.append(BuildGuide(program, tenant))

    def forget(self) -> None:
        """The worker is lost with all that it had built."""
        self._ready.clear()
        self._ready_bytes = 0
        self._starting.clear()
        self._asked.clear()
        self._urgent.clear()
        self._queue.clear()

    def renew(self) -> None:
        """There is another worker: ask it for every program that sequences wait for."""
        self.forget()
        for waiting in self._waiting.values():
            for sequence in islice(waiting.values(), 1):
                if sequence.sampling.guide is not None:
                    self._queue.add(sequence.request.tenant, sequence.sampling.guide)


def _about_to_start(sequence: Sequence) -> bool:
    """Whether nothing but its turn, or blocks, keep a sequence from starting with its guide."""
    away = sequence.ended or sequence.known_to_worker or sequence.state is State.HELD
    return not away and not sequence.request.paused
