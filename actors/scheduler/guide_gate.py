"""Guided sequences wait outside the batch until the worker has built their guides: no step ever builds one.

The worker keeps the programs that it was given last. The gate keeps half as many in the same order, so each program
that it knows as built is still there when a plan names it. A lost worker has none of them.
"""

from collections import OrderedDict
from typing import Final

from troupellm.actors.scheduler.ledger import Ledger
from troupellm.actors.scheduler.residents import Residents
from troupellm.actors.scheduler.sequence import Sequence, State
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.guide import MOST_PROGRAMS, MOST_TEXT_BYTES, EarlyEnd, GuideProgram
from troupellm.protocol.guided import BuildGuide
from troupellm.protocol.scheduler import GuideBuilt

MOST_READY: Final = MOST_PROGRAMS // 2
MOST_READY_BYTES: Final = MOST_TEXT_BYTES // 2
MOST_ASKED: Final = 1024
"""Programs that wait to be built. The next sequence keeps its place in the waiting room meanwhile."""

_LATE = "the model worker took too long to build the guide of this output"
_Key = tuple[str, str, str, EarlyEnd | None, str]


class GuideGate:
    """Holds sequences without blocks, as if their reader did not read, until their guide is built."""

    def __init__(self, residents: Residents, ledger: Ledger) -> None:
        self._residents = residents
        self._ledger = ledger
        self._ready: OrderedDict[_Key, None] = OrderedDict()
        """Least recently used first."""
        self._ready_bytes = 0
        self._waiting: dict[_Key, dict[int, Sequence]] = {}
        """By row. Sequences that have ended meanwhile stay until the answer comes."""
        self._asks: list[BuildGuide] = []

    @property
    def held(self) -> list[Sequence]:
        """Sequences that wait for nothing but their guide."""
        every = [sequence for waiting in self._waiting.values() for sequence in waiting.values()]
        return [sequence for sequence in every if sequence.state is State.HELD and not sequence.request.paused]

    @property
    def num_held(self) -> int:
        return len(self.held) if self._waiting else 0

    @property
    def full(self) -> bool:
        return len(self._waiting) >= MOST_ASKED

    def lacks(self, sequence: Sequence) -> bool:
        """Whether the worker must build a sequence's guide before it is admitted."""
        program = sequence.sampling.guide
        if program is None:
            return False
        key = _key(program)
        if key in self._ready:
            self._ready.move_to_end(key)
            return False
        return True

    def hold(self, sequence: Sequence) -> None:
        """Move a sequence out of the waiting room and ask for its guide, once per program."""
        program = sequence.sampling.guide
        assert program is not None
        self._residents.hold(sequence)
        waiting = self._waiting.get(_key(program))
        if waiting is None:
            waiting = self._waiting[_key(program)] = {}
            self._asks.append(BuildGuide(program, sequence.request.tenant))
        waiting[sequence.row] = sequence

    def take_asks(self) -> list[BuildGuide]:
        """The programs to build that nobody was asked for yet."""
        asks, self._asks = self._asks, []
        return asks

    def answer(self, built: GuideBuilt) -> None:
        """The sequences that waited go back to the waiting room, or end where the worker took too long."""
        key = _key(built.program)
        if built.outcome == "lost":
            self._ask_again(built.program)
            return
        if built.outcome == "built":
            self._keep(key)
        for sequence in self._waiting.pop(key, {}).values():
            if sequence.ended:
                continue
            if built.outcome == "late":
                self._ledger.end_request(sequence.request, EngineStopped(_LATE, code="server_is_overloaded"))
            elif sequence.state is State.HELD and not sequence.request.paused:
                self._residents.let_go(sequence)

    def _keep(self, key: _Key) -> None:
        if key not in self._ready:
            self._ready[key] = None
            self._ready_bytes += len(key[1])
        while len(self._ready) > 1 and (len(self._ready) > MOST_READY or self._ready_bytes > MOST_READY_BYTES):
            (_, text, _, _, _), _ = self._ready.popitem(last=False)
            self._ready_bytes -= len(text)

    def _ask_again(self, program: GuideProgram) -> None:
        waiting = [sequence for sequence in self._waiting.get(_key(program), {}).values() if not sequence.ended]
        if waiting:
            self._asks.append(BuildGuide(program, waiting[0].request.tenant))
        else:
            self._waiting.pop(_key(program), None)

    def forget(self) -> None:
        """The worker is lost with all that it had built."""
        self._ready.clear()
        self._ready_bytes = 0
        self._asks.clear()

    def renew(self) -> None:
        """There is another worker: ask it for every program that sequences wait for."""
        self._asks.clear()
        for waiting in list(self._waiting.values()):
            program = next(iter(waiting.values())).sampling.guide
            if program is not None:
                self._ask_again(program)


def _key(program: GuideProgram) -> _Key:
    return program.backend, program.text, program.after, program.early_end, program.tenant
