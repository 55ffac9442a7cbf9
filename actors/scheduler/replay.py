"""When the worker is lost: everybody goes back to the tokens they have, and is computed again by the next worker.

A stream goes on with the same tokens, because a draw is a pure function of seed, fork and position, and what was shown
once is among the tokens that the sequence starts from.
"""

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.planner import Planner
from troupellm.actors.scheduler.plans import PlansInFlight
from troupellm.actors.scheduler.quarantine import Kills, Quarantine
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.sequences.sequence import Request, Sequence
from troupellm.protocol.errors import EngineStopped, RequestFailed
from troupellm.protocol.messages.cache_groups import count_beam_blocks, count_blocks, windows_of
from troupellm.protocol.messages.scheduler import WorkerLost
from troupellm.protocol.messages.worker import WorkerReady


class Replay:
    """`reason` says why nothing is planned; None while there is a worker that can be trusted."""

    def __init__(
        self,
        open_requests: OpenRequests,
        running_set: RunningSet,
        tables: BlockTables,
        plans_in_flight: PlansInFlight,
        planner: Planner,
        quarantine: Quarantine,
        max_tokens: int,
    ) -> None:
        """max_tokens: of a step."""
        self._open = open_requests
        self._running_set = running_set
        self._tables = tables
        self._in_flight = plans_in_flight
        self._planner = planner
        self._quarantine = quarantine
        self._kills = Kills()
        self._max_tokens = max_tokens
        self.reason: str | None = None
        self.num_replayed = 0
        """Sequences that lost what was computed of them."""

    def distrust(self, reason: str) -> None:
        """The worker answers nonsense: nothing goes its way until it is replaced."""
        self.reason = reason

    def lose(self, lost: WorkerLost) -> None:
        """Forget everything that the worker's memory held, and what was under way."""
        self.reason = lost.reason
        self._planner.engine_epoch += 1
        if lost.exhausted:
            self._planner.tokens.shrink(self._planner.step)
        blamed = self._blame(lost)
        self.num_replayed += self._running_set.evacuate()
        self._tables.rebuild(self._tables.num_blocks, self._tables.num_state_slots)
        self._in_flight.forget()
        self._planner.forget()
        self._open.release_returned()
        for request in blamed:
            if lost.exhausted:
                error = EngineStopped("there is not enough memory for this request now", code="server_is_overloaded")
                self._open.end_request(request, error)
                continue
            live = next(sequence for sequence in request.sequences if not sequence.ended)
            self._open.fail(
                live, "the model worker died each time it computed this request", RequestFailed.default_code
            )

    def resume(self, ready: WorkerReady) -> None:
        """There is a worker again; its memory may have another size."""
        self._tables.rebuild(ready.num_blocks, ready.state_slots)
        for request in list(self._open.requests.values()):
            if _most_blocks(request, ready, self._max_tokens) > ready.num_blocks:
                error = RequestFailed("the KV cache of the restarted worker is too small for this request")
                self._open.end_request(request, error)
        self._quarantine.renew()
        self.reason = None

    def _blame(self, lost: WorkerLost) -> list[Request]:
        """The requests that killed the worker; usually none, or none is known yet."""
        met = self._sequences_of_plans()
        if not met:
            return []
        if lost.fault:
            return self._quarantine.accuse(met)
        return self._quarantine.suspect(met) if self._kills.add(met) else []

    def _sequences_of_plans(self) -> list[Sequence]:
        """Those that the lost plans named and that have not ended, each once."""
        found: dict[Sequence, None] = {}
        for launched in self._in_flight:
            for sequence, epoch in zip(launched.sequences, launched.epochs, strict=True):
                if sequence.epoch == epoch:
                    found[sequence] = None
        return list(found)


def _most_blocks(request: Request, ready: WorkerReady, span: int) -> int:
    """Blocks that a request needs at once to end: those of one sequence, or of all beams."""
    longest = max((sequence.limit - 1 for sequence in request.sequences if not sequence.ended), default=0)
    longest = max(longest, request.num_prompt_tokens)
    if request.search is None:
        return count_blocks(windows_of(ready), longest, span, ready.block_size)
    width = len(request.sequences)
    return count_beam_blocks(len(ready.groups), request.num_prompt_tokens, longest, width, ready.block_size)
