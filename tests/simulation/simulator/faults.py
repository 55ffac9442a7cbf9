"""The fault alphabet, and what of it happens in one seed.

A seed's faults are drawn beforehand: each waits for the n-th occasion at its target (a message, a step, a delta), goes
off once and is counted. Nothing goes off in the calm phase.
"""

from collections import Counter, defaultdict
from random import Random
from typing import Final

import msgspec

ACTORS: Final = ("intake", "scheduler", "worker", "output", "metrics", "stalls", "watchdog")
"""Every supervised child of the system."""
MAILBOXES: Final = ("intake", "scheduler", "worker", "output", "metrics")
SILENT: Final = ("stalls", "watchdog")
"""Actors that take no messages: their waits are the occasions."""
LOSSES: Final = (
    "death", "killed", "poison", "allocation", "wrong_shape", "bad_id", "stale_epoch", "missing_row", "duplicate",
)  # fmt: skip
"""After these the worker is replaced. No request is lost, unless it was alone with the worker twice."""
WORKER_FAULTS: Final = (*LOSSES, "stall", "hang", "late", "row_error")
PROCESS_LOSSES: Final = ("signal", "exit", "garbage", "hang_up", "stop", "spin")
PROCESS_FAULTS: Final = (*PROCESS_LOSSES, "no_start", "load_failure")
"""Of a worker that has a process of its own."""
CLIENT_FAULTS: Final = ("disconnect", "stall", "slow")
ENGINE_FAULTS: Final = ("drain", "wall_jump", "cache_reset")
FRONT_FAULTS: Final = ("slow", "cut", "death", "garbage")
"""Of a front process and its wire: pieces are held up, the wire breaks inside a frame, the process is killed, one of
its ends says what is no frame. After all but the first it is replaced, and its own clients are told so."""

CRASHES: Final = ("exception", "exception_after", "cancel")
PLAIN_ALPHABET: Final[tuple[tuple[str, str], ...]] = (
    *((actor, kind) for actor in ACTORS for kind in CRASHES),
    *((mailbox, kind) for mailbox in MAILBOXES for kind in ("delay", "lost_wakeup")),
    *(("worker", kind) for kind in WORKER_FAULTS),
    *(("client", kind) for kind in CLIENT_FAULTS),
    *(("engine", kind) for kind in ENGINE_FAULTS),
    ("pool", "exception"),
)
GUIDE_FAULTS: Final = (*CRASHES, "delay", "lost_wakeup")
"""Of the actor that has guides compiled."""
ADAPTER_FAULTS: Final = (*CRASHES, "delay", "lost_wakeup", "refused", "late")
"""Of the adapter library. refused and late: the worker cannot read an adapter, or takes too long."""
HOST: Final = "host"
FAILING_TIER: Final = "peer"
"""A connector that ends requests whose blocks do not come; with other tiers they are computed."""
TIERS: Final = (HOST, "disk", FAILING_TIER)
"""Behind the cache."""
HOST_FAULTS: Final = ("store_error", "load_error", "busy", "slow", "late", "killed", "reset", "sleep")
OUTER_FAULTS: Final = (*HOST_FAULTS, "corrupt", "short", "missing", "full", "lies")
"""late: a transfer ends well long after its waiting sequence has left. killed, reset, sleep: the worker, the prefix
cache,
the engine, while transfers of the tier are under way. lies: a look-up promises what is not there."""
TIER_ALPHABET: Final = tuple((tier, kind) for tier in TIERS for kind in (HOST_FAULTS if tier == HOST else OUTER_FAULTS))
ALPHABET: Final = (
    *PLAIN_ALPHABET,
    *(("process", kind) for kind in PROCESS_FAULTS),
    *(("guide", kind) for kind in GUIDE_FAULTS),
    ("engine", "pause"),
    *(("adapters", kind) for kind in ADAPTER_FAULTS),
    *TIER_ALPHABET,
    *(("front", kind) for kind in FRONT_FAULTS),
)
"""(actor, fault) pairs. Pressure on pools, queues and mailboxes is no event: it comes with a seed's settings."""

_FATAL: Final = tuple((actor, kind) for actor in ("scheduler", "worker") for kind in CRASHES)
_HANG: Final = ("worker", "hang")
_TIER_KILLS: Final = tuple((tier, "killed") for tier in TIERS)
_FROM_OUTSIDE: Final = (("worker", "killed"), ("process", "stop"), *_TIER_KILLS)


class Injected(Exception):
    """Raised by the simulation. Everything else that crashes an actor is a bug."""


class InjectedDeath(Injected):
    """The worker died."""


class InjectedAllocation(MemoryError, Injected):
    """The worker ran out of memory in one step."""


class Fault(msgspec.Struct, frozen=True):
    target: str
    kind: str
    at: int
    """Goes off at the n-th occasion, from 1."""
    span: int = 1
    """Occasions that it lasts."""
    seconds: float = 0.0
    """Of delays and stalls."""

    @property
    def pair(self) -> tuple[str, str]:
        return self.target, self.kind


def draw_faults(random: Random) -> tuple[Fault, ...]:
    """One seed in eight is undisturbed; the others get up to five faults."""
    if random.random() < 0.125:
        return ()
    return tuple(_draw_fault(random) for _ in range(random.choice((1, 1, 2, 2, 3, 5))))


def _draw_fault(random: Random) -> Fault:
    target, kind = random.choice(PLAIN_ALPHABET)
    at = 1 + int(random.expovariate(0.2))
    if target in ("client", "pool", *SILENT):
        at = random.choice((1, 1, 2, 3))
    elif target == "engine":  # asked once, at the start
        at = 1
    span = random.choice((1, 2, 5, 20)) if kind == "delay" else random.choice((1, 1, 1, 2, 3))
    if kind in ("lost_wakeup", "poison"):
        span = 1
    return Fault(target, kind, at, span, random.choice((0.001, 0.02, 0.1, 0.5)))


class Injector:
    """Counts occasions and says what goes off at each. `hits` counts what went off."""

    def __init__(self, faults: tuple[Fault, ...], *, process: bool) -> None:
        """process: the worker has one of its own, which can be ended when it hangs."""
        self._process = process
        self._faults: dict[tuple[str, str], list[Fault]] = defaultdict(list)
        for fault in faults:
            self._faults[fault.pair].append(fault)
        self._occasions: Counter[tuple[str, str]] = Counter()
        self.hits: Counter[tuple[str, str]] = Counter()
        self.calm = False

    def strike(self, target: str, kind: str) -> Fault | None:
        """An occasion for a fault: the one that goes off now, if any."""
        faults = self._faults.get((target, kind))
        if faults is None or self.calm:
            return None
        self._occasions[target, kind] += 1
        occasion = self._occasions[target, kind]
        for fault in faults:
            if fault.at <= occasion < fault.at + fault.span:
                self.hits[target, kind] += 1
                return fault
        return None

    @property
    def losses(self) -> int:
        """How often the worker was lost."""
        plain = sum(self.hits["worker", kind] for kind in LOSSES)
        own = sum(self.hits["process", kind] for kind in PROCESS_LOSSES)
        own += sum(self.hits[pair] for pair in _TIER_KILLS)
        return plain + own + (self.hits[_HANG] if self._process else 0)

    @property
    def failures(self) -> int:
        """How often it was lost by itself, not by a fault from outside."""
        return self.losses - sum(self.hits[pair] for pair in _FROM_OUTSIDE)

    @property
    def fatal(self) -> bool:
        """Whether something happened that may end the engine for good."""
        return self.happened(*_FATAL) or (not self._process and bool(self.hits[_HANG]))

    def happened(self, *pairs: tuple[str, str]) -> bool:
        return any(self.hits[pair] for pair in pairs)

    def most_crashes(self) -> int:
        """How often the actor that crashed most often did."""
        return max(sum(self.hits[actor, kind] for kind in CRASHES) for actor in (*ACTORS, "guide", "adapters"))
