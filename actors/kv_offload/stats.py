"""The published statistics of the tiers."""

from collections import Counter, defaultdict

from troupellm.protocol.messages.kv_transfers import TierInfo, TierReport, TransferDone, TransferKind
from troupellm.protocol.messages.snapshot import TierSnapshot

_INWARD: dict[TransferKind, bool] = {"store": False, "spill": False, "load": True, "fetch": True}


class _Tier:
    __slots__ = ("dropped", "failures", "hits", "lookups", "misses", "moved", "seconds")

    def __init__(self) -> None:
        self.lookups = self.hits = self.misses = self.failures = self.dropped = 0
        self.moved: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)


class Counts:
    """Counts since the start. `now` is the time of the last plan or result, in seconds."""

    def __init__(self, block_bytes: tuple[int, ...], tiers: tuple[TierInfo, ...]) -> None:
        """block_bytes: per cache group."""
        self.now = 0.0
        self.num_timeouts = 0
        """Sequences that went on without what a tier took too long for."""
        self.num_skipped = 0
        """Blocks that were not stored: no credit was left, or no place."""
        self.num_filtered = 0
        """Blocks that were not stored, since they were of too little use so far."""
        self.queried_tokens = 0
        """Looked up in the tiers, because the device does not have them."""
        self.hit_tokens = 0
        self._block_bytes = max(block_bytes, default=0)
        self._infos = tiers
        self._tiers = [_Tier() for _ in range(1 + len(tiers))]
        self._reports: dict[int, TierReport] = {}

    def renew(self, tiers: tuple[TierInfo, ...]) -> None:
        """The worker is another one."""
        self._infos = tiers
        self._reports.clear()
        self._tiers += [_Tier() for _ in range(1 + len(tiers) - len(self._tiers))]

    def report(self, reports: tuple[TierReport, ...]) -> None:
        for report in reports:
            self._reports[report.tier] = report

    def disabled(self, tier: int) -> str:
        report = self._reports.get(tier)
        return "" if report is None else report.disabled

    def moved(self, kind: TransferKind, answer: TransferDone, tier: int = 0) -> None:
        """A transfer has ended."""
        counted = self._tiers[tier]
        counted.seconds[kind] += answer.seconds
        if answer.ok:
            counted.moved[kind] += 1
        elif answer.error == "miss" and _INWARD[kind]:
            counted.misses += 1
        elif answer.error != "cancelled":
            counted.failures += 1

    def looked_up(self, tier: int, asked: int, found: int) -> None:
        """Blocks."""
        counted = self._tiers[tier]
        counted.lookups += asked
        counted.hits += found
        counted.misses += asked - found

    def dropped(self, tier: int) -> None:
        """A block that did not go to an outer tier: too much was under way, or it had left host memory before."""
        self._tiers[tier].dropped += 1

    def snapshot(self, num_used: int, num_places: int, num_evicted: int) -> tuple[TierSnapshot, ...]:
        """Args: of the host tier, whose places the scheduler gives out; the others tell of themselves."""
        shots = []
        for number, counted in enumerate(self._tiers[: 1 + len(self._infos)]):
            report = self._reports.get(number) or TierReport(tier=number)
            inward, outward = ("load", "store") if number == 0 else ("fetch", "spill")
            host = number == 0
            shots.append(
                TierSnapshot(
                    name="host" if host else self._infos[number - 1].name,
                    blocks=num_used if host else report.blocks,
                    used_bytes=num_used * self._block_bytes if host else report.used_bytes,
                    capacity_bytes=num_places * self._block_bytes if host else report.capacity_bytes,
                    lookups=counted.lookups,
                    hits=counted.hits,
                    misses=counted.misses,
                    loads=counted.moved[inward],
                    stores=counted.moved[outward],
                    load_seconds=counted.seconds[inward],
                    store_seconds=counted.seconds[outward],
                    moved_bytes=(counted.moved[inward] + counted.moved[outward]) * self._block_bytes,
                    evictions=num_evicted if host else report.evicted,
                    failures=max(counted.failures, report.failed),
                    corrupt=report.corrupt,
                    dropped=counted.dropped if number else self.num_skipped,
                    disabled=report.disabled,
                    disablings=report.disablings,
                    late=report.late,
                )
            )
        return tuple(shots)
