"""Admission: how many requests and prompt tokens may be inside the engine at once, and how many of each tenant.

Counted before anything is tokenized, so a refusal costs microseconds: a request with n answers counts n times, text is
estimated by its length until the tokenizer has spoken, and what belongs together is let in together or not at all.
Among those who wait in line the tenant with the fewest sequences inside comes first, and within it who came first. A
tenant's own limits are looked at when one asks and again when it is let in, since others of its may have come between.
"""

from collections import OrderedDict
from collections.abc import Callable

from troupellm.actors.admission.quotas import Quotas, Room
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.errors import EngineOverloaded, EngineStopped, RateLimited
from troupellm.protocol.messages.input import Demand
from troupellm.protocol.quota import Quota

_SMOOTHING = 0.2
_RETRY_AFTER_RANGE = (1.0, 30.0)


class Place:
    """The capacity that one request holds. Every method is idempotent: only its first call has an effect."""

    __slots__ = ("_admission", "_party", "_taken", "_waiting_tokens", "handed_over", "quota", "sequences", "tenant")

    def __init__(self, admission: "Admission", demand: Demand, party: "_Party | None", quota: Quota | None) -> None:
        self._admission = admission
        self._party = party
        self.tenant = demand.tenant
        self.sequences = demand.sequences
        self.quota = quota
        """The remaining limits of its tenant."""
        self.handed_over = False
        """True once the engine has the request and will report its usage."""
        self._waiting_tokens = demand.tokens
        self._taken: int | None = demand.tokens + demand.max_tokens

    def tokenized(self, tokens: int) -> None:
        """The prompt's true length, instead of the estimate."""
        if self._waiting_tokens:
            self._admission.change(self.tenant, tokens - self._waiting_tokens)
            if self._taken is not None:
                self._admission.quotas.change(self.tenant, tokens=tokens - self._waiting_tokens)
                self._taken += tokens - self._waiting_tokens
            self._waiting_tokens = tokens

    def scheduled(self) -> None:
        """Its prompt waits no longer."""
        self._admission.change(self.tenant, -self._waiting_tokens)
        self._waiting_tokens = 0

    def leave(self) -> None:
        tokens, sequences = self._waiting_tokens, self.sequences
        self._waiting_tokens = self.sequences = 0
        if sequences:
            self._admission.left(self.tenant, sequences, tokens, self._party)
        if not self.handed_over:
            self.settle(0, 0)

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Charge the tokens that the request actually used."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._admission.quotas.settle(
                self.tenant, taken=taken, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
            )


class _Party:
    """Room that was taken for several requests of one call and is handed out to them one by one."""

    __slots__ = ("inside", "name", "sequences", "tenant", "tokens")

    def __init__(self, name: str, tenant: str, sequences: int, tokens: int) -> None:
        self.name = name
        self.tenant = tenant
        self.sequences = sequences
        self.tokens = tokens
        self.inside = 0
        """Members that have not left."""


class _Applicant:
    __slots__ = ("demand", "place", "refusal", "waiter")

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.place: Place | None = None
        self.refusal: RateLimited | None = None
        self.waiter: Waiter = new_waiter()


class Admission:
    """The engine's door. A request larger than the whole room is let in when it is empty."""

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        weights = {tenant.name: tenant.weight for tenant in config.tenants}
        self.quotas = Quotas(config.tenants, clock)
        self.capacity = config.max_num_seqs + config.max_num_queued_reqs
        self._weights = weights
        self._sequences = Room(self.capacity, weights)
        self._tokens = None if config.max_num_queued_tokens is None else Room(config.max_num_queued_tokens, weights)
        self._clock = clock
        self._parties: dict[str, _Party] = {}
        self._line: dict[str, OrderedDict[_Applicant, None]] = {}
        """Waiting applicants by tenant. A tenant without applicants has no entry, and applicants that leave are removed
        at once."""
        self._closed = False
        self.refusal: Callable[[], EngineStopped] | None = None
        """Returns the error for requests that do not wait, while the engine admits none of them; None otherwise."""
        self._seconds_per_leave: float | None = None
        self._last_leave: float | None = None

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._line.values())

    def enter(self, demand: Demand) -> Place:
        """Take a place now.

        Raises:
            InvalidRequest: it asks for more sequences than its tenant may ever have at once.
            RateLimited: the tenant has reached a limit of its own.
            EngineOverloaded: there is no place; `retry_after` guesses from how fast places became free.
            EngineStopped: the engine takes no more requests.
        """
        self._check_open()
        if self.refusal is not None:
            raise self.refusal()
        if self._has_room_of_its_party(demand):
            return self._admit(demand)
        self._check_quota(demand)
        if not self._goes_first(demand):
            raise self._refusal(_whole(demand)[0])
        return self._admit(demand)

    async def wait(self, demand: Demand) -> Place:
        """Take a place, waiting in line for it.

        Raises:
            InvalidRequest: it asks for more sequences than its tenant may ever have at once.
            RateLimited: the tenant has reached one of its own limits. A waiting request also waits for the concurrency
                limits; the limits per minute may still refuse it.
            EngineStopped: the engine takes no more requests.
        """
        self._check_open()
        if self._has_room_of_its_party(demand):
            return self._admit(demand)
        self._check_quota(demand)
        if self._goes_first(demand):
            return self._admit(demand)
        applicant = _Applicant(demand)
        self._line.setdefault(demand.tenant, OrderedDict())[applicant] = None
        try:
            await applicant.waiter.wait()
        except BaseException:
            if applicant.place is not None:
                applicant.place.leave()
            elif applicant in self._line.get(demand.tenant, ()):
                self._take_out(applicant)
                self._serve()
            raise
        if applicant.refusal is not None:
            raise applicant.refusal
        if applicant.place is None:
            self._check_open()
            raise EngineStopped("the engine is stopping")
        return applicant.place

    def close(self) -> None:
        """Admit no more requests; those in line get `EngineStopped`."""
        self._closed = True
        line, self._line = self._line, {}
        for applicants in line.values():
            for applicant in applicants:
                applicant.waiter.wake()

    def change(self, tenant: str, tokens: int) -> None:
        """So many more prompt tokens of a tenant wait."""
        if self._tokens is not None:
            self._tokens.change(tenant, tokens)
        if tokens < 0:
            self._serve()

    def left(self, tenant: str, sequences: int, tokens: int, party: _Party | None) -> None:
        now = self._clock.now()
        if self._last_leave is not None:
            gap = (now - self._last_leave) / sequences
            last = self._seconds_per_leave
            self._seconds_per_leave = gap if last is None else last + _SMOOTHING * (gap - last)
        self._last_leave = now
        if party is not None:
            party.inside -= 1
            if not party.inside:  # the party ends here: later requests of that name start a new one
                if self._parties.get(party.name) is party:
                    del self._parties[party.name]
                sequences, tokens = sequences + party.sequences, tokens + party.tokens
                party.sequences = party.tokens = 0
        self.quotas.leave(tenant, sequences)
        self._give_back(tenant, sequences, tokens)
        self._serve()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the engine takes no more requests")

    def _check_quota(self, demand: Demand) -> None:
        bulk, whole = demand.bulk, demand.party or demand
        if bulk is not None and not bulk.first:
            return
        tokens = whole.tokens + whole.max_tokens if bulk is None else bulk.tokens
        field = "prompt" if whole.sequences > demand.sequences else "n"
        self.quotas.check(demand.tenant, requests=1, sequences=whole.sequences, tokens=tokens, field=field)

    def _rooms(self, demand: Demand) -> list[tuple[Room, int]]:
        """The amount that a request, or its whole party, takes of each room."""
        sequences, tokens = _whole(demand)
        if self._tokens is None:
            return [(self._sequences, sequences)]
        return [(self._sequences, sequences), (self._tokens, tokens)]

    def _has_room_of_its_party(self, demand: Demand) -> bool:
        party = None if demand.party is None else self._parties.get(demand.party.name)
        fits = party is not None and party.sequences >= demand.sequences and party.tokens >= demand.tokens
        return fits and party is not None and party.tenant == demand.tenant

    def _admit(self, demand: Demand) -> Place:
        """Room was found: take it, for the whole party if this is its first member."""
        party, first, taken = None, True, demand.sequences
        if demand.party is not None:
            party = self._parties.get(demand.party.name)
            if self._has_room_of_its_party(demand):
                first, taken = False, 0
            else:
                taken, tokens = _whole(demand)
                self._take(demand.tenant, taken, tokens)
                party = self._parties[demand.party.name] = _Party(demand.party.name, demand.tenant, taken, tokens)
            assert party is not None
            party.inside += 1
            party.sequences -= demand.sequences
            party.tokens -= demand.tokens
        else:
            self._take(demand.tenant, demand.sequences, demand.tokens)
        quota = self.quotas.take(
            demand.tenant,
            requests=int(first and (demand.bulk is None or demand.bulk.first)),
            sequences=taken,
            tokens=demand.tokens + demand.max_tokens,
        )
        return Place(self, demand, party, quota)

    def _take(self, tenant: str, sequences: int, tokens: int) -> None:
        self._sequences.change(tenant, sequences)
        if self._tokens is not None:
            self._tokens.change(tenant, tokens)

    def _give_back(self, tenant: str, sequences: int, tokens: int) -> None:
        self._sequences.change(tenant, -sequences)
        if self._tokens is not None:
            self._tokens.change(tenant, -tokens)

    def _serve(self) -> None:
        """Admit applicants in turn, until the next one must wait for room."""
        while (demand := self._next()) is not None:
            applicant = next(iter(self._line[demand.tenant]))
            self._take_out(applicant)
            try:
                if not self._has_room_of_its_party(demand):
                    self._check_quota(demand)
                applicant.place = self._admit(demand)
            except RateLimited as error:  # those before it have used what there was when it asked
                applicant.refusal = error
            applicant.waiter.wake()

    def _next(self, newcomer: Demand | None = None) -> Demand | None:
        """The demand to admit next: `newcomer`, or the first in line of a tenant.

        A tenant at its own limit does not block the others. A demand that waits for the shared part of either room does
        not block tenants that fit their reserved parts of both rooms. A demand that is larger than the shared part
        blocks all others until the room is empty.
        """
        firsts = {tenant: next(iter(line)).demand for tenant, line in self._line.items()}
        if newcomer is not None:
            firsts[newcomer.tenant] = newcomer
        somebody_waits = False
        for tenant in sorted(firsts, key=self._fullness):
            demand = firsts[tenant]
            if self._has_room_of_its_party(demand):
                return demand
            if not self.quotas.fits(tenant, _whole(demand)[0]):
                continue
            rooms = self._rooms(demand)
            if all(room.fits(tenant, amount, kept_only=somebody_waits) for room, amount in rooms):
                return demand
            if not all(room.may_fit(tenant, amount) for room, amount in rooms):
                return None
            somebody_waits = True
        return None

    def _goes_first(self, demand: Demand) -> bool:
        """Whether one who has just come gets a place before those in line."""
        return demand.tenant not in self._line and self._next(demand) is demand

    def _fullness(self, tenant: str) -> float:
        return self._sequences.usage(tenant) / self._weights.get(tenant, 1.0)

    def _take_out(self, applicant: _Applicant) -> None:
        line = self._line[applicant.demand.tenant]
        del line[applicant]
        if not line:
            del self._line[applicant.demand.tenant]

    def _refusal(self, sequences: int) -> EngineOverloaded:
        text = f"the waiting room is full: {self._sequences.used} of {self.capacity} places are taken"
        if self._tokens is not None:
            text += f", {self._tokens.used} of {self._tokens.capacity} prompt tokens wait"
        return EngineOverloaded(text, retry_after=self._retry_after(sequences))

    def _retry_after(self, sequences: int) -> float:
        """Seconds until so many places should be free, and those in line served."""
        low, high = _RETRY_AFTER_RANGE
        ahead = sequences + sum(_whole(applicant.demand)[0] for line in self._line.values() for applicant in line)
        return min(max((self._seconds_per_leave or low) * ahead, low), high)


def _whole(demand: Demand) -> tuple[int, int]:
    """Sequences and prompt tokens, of the whole party if it is one's."""
    party = demand.party
    return (demand.sequences, demand.tokens) if party is None else (party.sequences, party.tokens)
