"""Admission: how many requests and prompt tokens may be inside the engine at once, and how many of each tenant.

Counted before anything is tokenized, so a refusal costs microseconds: a request with n answers counts n times, text is
estimated by its length until the tokenizer has spoken, and what belongs together is let in together or not at all.
Among those who wait in line the tenant with the fewest sequences inside comes first, and within it who came first. A
tenant's own limits are looked at when one asks and again when it is let in, since others of its may have come between.
"""

from collections import OrderedDict
from collections.abc import Callable

from troupellm.actors.admission.quotas import Quotas
from troupellm.actors.admission.tenant_capacity import TenantCapacity
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.errors import EngineOverloaded, EngineStopped, RateLimited
from troupellm.protocol.messages.input import Demand
from troupellm.protocol.quota import Quota

_SMOOTHING = 0.2
_RETRY_AFTER_RANGE = (1.0, 30.0)


class AdmissionSlot:
    """The capacity that one request holds. Every method is idempotent: only its first call has an effect."""

    __slots__ = ("_admission", "_group", "_taken", "_waiting_tokens", "handed_over", "quota", "sequences", "tenant")

    def __init__(
        self, admission: "Admission", demand: Demand, request_group: "_Group | None", quota: Quota | None
    ) -> None:
        self._admission = admission
        self._group = request_group
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
            self._admission.left(self.tenant, sequences, tokens, self._group)
        if not self.handed_over:
            self.settle(0, 0)

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Charge the tokens that the request actually used."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._admission.quotas.settle(
                self.tenant, taken=taken, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
            )


class _Group:
    """Capacity that was taken for several requests of one call and is handed out to them one by one."""

    __slots__ = ("inside", "name", "sequences", "tenant", "tokens")

    def __init__(self, name: str, tenant: str, sequences: int, tokens: int) -> None:
        self.name = name
        self.tenant = tenant
        self.sequences = sequences
        self.tokens = tokens
        self.inside = 0
        """Members that have not left."""


class _Applicant:
    __slots__ = ("demand", "refusal", "slot", "waiter")

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.slot: AdmissionSlot | None = None
        self.refusal: RateLimited | None = None
        self.waiter: Waiter = new_waiter()


class Admission:
    """The engine's door. A request larger than the whole capacity is let in when it is empty."""

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        weights = {tenant.name: tenant.weight for tenant in config.tenants}
        self.quotas = Quotas(config.tenants, clock)
        self.capacity = config.max_num_seqs + config.max_num_queued_reqs
        self._weights = weights
        self._sequences = TenantCapacity(self.capacity, weights)
        self._tokens = (
            None if config.max_num_queued_tokens is None else TenantCapacity(config.max_num_queued_tokens, weights)
        )
        self._clock = clock
        self._groups: dict[str, _Group] = {}
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

    def enter(self, demand: Demand) -> AdmissionSlot:
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
        if self._fits_its_group(demand):
            return self._admit(demand)
        self._check_quota(demand)
        if not self._goes_first(demand):
            raise self._refusal(_whole(demand)[0])
        return self._admit(demand)

    async def wait(self, demand: Demand) -> AdmissionSlot:
        """Take a place, waiting in line for it.

        Raises:
            InvalidRequest: it asks for more sequences than its tenant may ever have at once.
            RateLimited: the tenant has reached one of its own limits. A waiting request also waits for the concurrency
                limits; the limits per minute may still refuse it.
            EngineStopped: the engine takes no more requests.
        """
        self._check_open()
        if self._fits_its_group(demand):
            return self._admit(demand)
        self._check_quota(demand)
        if self._goes_first(demand):
            return self._admit(demand)
        applicant = _Applicant(demand)
        self._line.setdefault(demand.tenant, OrderedDict())[applicant] = None
        try:
            await applicant.waiter.wait()
        except BaseException:
            if applicant.slot is not None:
                applicant.slot.leave()
            elif applicant in self._line.get(demand.tenant, ()):
                self._take_out(applicant)
                self._serve()
            raise
        if applicant.refusal is not None:
            raise applicant.refusal
        if applicant.slot is None:
            self._check_open()
            raise EngineStopped("the engine is stopping")
        return applicant.slot

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

    def left(self, tenant: str, sequences: int, tokens: int, request_group: _Group | None) -> None:
        now = self._clock.now()
        if self._last_leave is not None:
            gap = (now - self._last_leave) / sequences
            last = self._seconds_per_leave
            self._seconds_per_leave = gap if last is None else last + _SMOOTHING * (gap - last)
        self._last_leave = now
        if request_group is not None:
            request_group.inside -= 1
            if not request_group.inside:  # the group ends here: later requests of that name start a new one
                if self._groups.get(request_group.name) is request_group:
                    del self._groups[request_group.name]
                sequences, tokens = sequences + request_group.sequences, tokens + request_group.tokens
                request_group.sequences = request_group.tokens = 0
        self.quotas.leave(tenant, sequences)
        self._give_back(tenant, sequences, tokens)
        self._serve()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the engine takes no more requests")

    def _check_quota(self, demand: Demand) -> None:
        many_prompts, whole = demand.many_prompts, demand.request_group or demand
        if many_prompts is not None and not many_prompts.first:
            return
        tokens = whole.tokens + whole.max_tokens if many_prompts is None else many_prompts.tokens
        field = "prompt" if whole.sequences > demand.sequences else "n"
        self.quotas.check(demand.tenant, requests=1, sequences=whole.sequences, tokens=tokens, field=field)

    def _capacities(self, demand: Demand) -> list[tuple[TenantCapacity, int]]:
        """The amount that a request, or its whole group, takes of each capacity."""
        sequences, tokens = _whole(demand)
        if self._tokens is None:
            return [(self._sequences, sequences)]
        return [(self._sequences, sequences), (self._tokens, tokens)]

    def _fits_its_group(self, demand: Demand) -> bool:
        request_group = None if demand.request_group is None else self._groups.get(demand.request_group.name)
        fits = (
            request_group is not None
            and request_group.sequences >= demand.sequences
            and request_group.tokens >= demand.tokens
        )
        return fits and request_group is not None and request_group.tenant == demand.tenant

    def _admit(self, demand: Demand) -> AdmissionSlot:
        """Capacity was found: take it, for the whole group if this is its first member."""
        request_group, first, taken = None, True, demand.sequences
        if demand.request_group is not None:
            request_group = self._groups.get(demand.request_group.name)
            if self._fits_its_group(demand):
                first, taken = False, 0
            else:
                taken, tokens = _whole(demand)
                self._take(demand.tenant, taken, tokens)
                request_group = self._groups[demand.request_group.name] = _Group(
                    demand.request_group.name, demand.tenant, taken, tokens
                )
            assert request_group is not None
            request_group.inside += 1
            request_group.sequences -= demand.sequences
            request_group.tokens -= demand.tokens
        else:
            self._take(demand.tenant, demand.sequences, demand.tokens)
        quota = self.quotas.take(
            demand.tenant,
            requests=int(first and (demand.many_prompts is None or demand.many_prompts.first)),
            sequences=taken,
            tokens=demand.tokens + demand.max_tokens,
        )
        return AdmissionSlot(self, demand, request_group, quota)

    def _take(self, tenant: str, sequences: int, tokens: int) -> None:
        self._sequences.change(tenant, sequences)
        if self._tokens is not None:
            self._tokens.change(tenant, tokens)

    def _give_back(self, tenant: str, sequences: int, tokens: int) -> None:
        self._sequences.change(tenant, -sequences)
        if self._tokens is not None:
            self._tokens.change(tenant, -tokens)

    def _serve(self) -> None:
        """Admit applicants in turn, until the next one must wait for capacity."""
        while (demand := self._next()) is not None:
            applicant = next(iter(self._line[demand.tenant]))
            self._take_out(applicant)
            try:
                if not self._fits_its_group(demand):
                    self._check_quota(demand)
                applicant.slot = self._admit(demand)
            except RateLimited as error:  # those before it have used what there was when it asked
                applicant.refusal = error
            applicant.waiter.wake()

    def _next(self, newcomer: Demand | None = None) -> Demand | None:
        """The demand to admit next: `newcomer`, or the first in line of a tenant.

        A tenant at its own limit does not block the others. A demand that waits for the shared part of either capacity
        does not block tenants that fit their reserved parts of both rooms. A demand that is larger than the shared part
        blocks all others until the capacity is empty.
        """
        firsts = {tenant: next(iter(line)).demand for tenant, line in self._line.items()}
        if newcomer is not None:
            firsts[newcomer.tenant] = newcomer
        somebody_waits = False
        for tenant in sorted(firsts, key=self._fullness):
            demand = firsts[tenant]
            if self._fits_its_group(demand):
                return demand
            if not self.quotas.fits(tenant, _whole(demand)[0]):
                continue
            capacities = self._capacities(demand)
            if all(
                tenant_capacity.fits(tenant, amount, kept_only=somebody_waits) for tenant_capacity, amount in capacities
            ):
                return demand
            if not all(tenant_capacity.may_fit(tenant, amount) for tenant_capacity, amount in capacities):
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
        text = f"the waiting queue is full: {self._sequences.used} of {self.capacity} places are taken"
        if self._tokens is not None:
            text += f", {self._tokens.used} of {self._tokens.capacity} prompt tokens wait"
        return EngineOverloaded(text, retry_after=self._retry_after(sequences))

    def _retry_after(self, sequences: int) -> float:
        """Seconds until so many places should be free, and those in line served."""
        low, high = _RETRY_AFTER_RANGE
        ahead = sequences + sum(_whole(applicant.demand)[0] for line in self._line.values() for applicant in line)
        return min(max((self._seconds_per_leave or low) * ahead, low), high)


def _whole(demand: Demand) -> tuple[int, int]:
    """Sequences and prompt tokens, of the whole group if it is one's."""
    request_group = demand.request_group
    return (
        (demand.sequences, demand.tokens) if request_group is None else (request_group.sequences, request_group.tokens)
    )
