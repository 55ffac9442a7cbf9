"""How many tokens a step computes, how many of them for prompts, and how tenants share those.

Prompts get no more tokens than fill the device, and no more than running streams can bear. A step beyond what saturates
the device takes longer without doing more per second, so prompts that come together would all get their first tokens at
its end instead of one after another. While a request streams, a step should not take longer than the inter-token
target. It may always take twice as long as one without prompts, so that prompts cannot starve either. On a CPU, a
prompt without other work takes longer steps, as long as they remain short: the fixed cost of a step is then paid less
often. New requests wait for the steps that are under way.
"""

from collections.abc import Iterable

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.worker import WorkerReady

LEAST_TOKENS = 16
"""Prompt tokens that every step may compute; fewer at a time would cost more in steps than they save."""
SLOWDOWN = 2.0
"""A step with prompts may take so many times as long as one without, regardless of the target."""
LONE_SECONDS = 0.1
"""Of the steps under way, together, of a prompt beside which there is nothing to do."""
_WEIGHT = 0.3
"""Of the newest step in the averages."""
_CAREFUL_STEPS = 64
"""So many steps after one found no memory, steps may be twice as large again."""


class StepTokens:
    """The tokens of a step, and of a sequence in it."""

    def __init__(self, config: SchedulerConfig, *, whole_prompts: bool) -> None:
        """whole_prompts: the model needs all of a prompt in one step, however small steps have become."""
        self._whole_prompts = whole_prompts
        self.chunked = config.enable_chunked_prefill and not whole_prompts
        self.most = self.usual = config.max_num_batched_tokens
        """Of the next step: fewer than usual for a while after a step found no memory."""
        self._grows_at = 0

    def shrink(self, step: int) -> None:
        """A step found no memory: the next ones compute half as much, then carefully more."""
        self.most = max(1, self.most // 2)
        self._grows_at = step + _CAREFUL_STEPS

    def grow(self, step: int) -> None:
        """Twice as many again, if enough steps have passed."""
        if step >= self._grows_at:
            self.most = min(2 * self.most, self.usual)
            self._grows_at = step + _CAREFUL_STEPS

    def allowed(self, wanted: int, budget: int, prefill: int) -> int:
        """Tokens for a sequence. Without chunking all or none, except what exceeds a whole step.

        Args:
            budget: tokens that the step has left.
            prefill: how many of them may go to a prompt.
        """
        if wanted == 1:
            return max(0, min(1, budget))
        if self.chunked:
            return max(0, min(wanted, budget, prefill))
        if wanted <= budget:
            return wanted if prefill > 0 else 0
        if budget < self.most:
            return 0
        return wanted if self._whole_prompts else budget


class PrefillBudget:
    """Learns what steps cost from how long they took. Times are seconds."""

    def __init__(self, config: SchedulerConfig, ready: WorkerReady) -> None:
        wanted = config.max_num_prefill_tokens
        if wanted == "auto":
            wanted = ready.saturation_tokens or config.max_num_batched_tokens
        self.most = min(wanted, config.max_num_batched_tokens)
        """Tokens, without regard to streams."""
        # On a GPU the log-probabilities of a long step's prompt would take memory that is not reserved.
        free = config.max_num_prefill_tokens == "auto" and ready.device == "cpu"
        self._most_alone = config.max_num_batched_tokens if free else self.most
        self._lone_seconds = LONE_SECONDS / config.plans_in_flight
        self._target = config.itl_target_ms / 1000
        self._per_token = self._at_start = ready.saturation_seconds / max(ready.saturation_tokens, 1)
        """0 is unknown."""
        self._decode: dict[int, float] = {}
        """Seconds of a step without prompts, by the bit length of its number of rows."""
        self._last_end = 0.0

    def seconds_per_token(self) -> float:
        """Seconds that a token of a prompt takes; 0 is unknown."""
        return self._per_token

    def tokens(self, decode_rows: int, *, streaming: bool, alone: bool = False) -> int:
        """For the next step; at least 1.

        Args:
            decode_rows: sequences that get a token in the step in any case.
            streaming: True if one of them has a reader.
            alone: only one prompt is to be computed, and no sequence gets a token.
        """
        if alone and self._at_start:
            return self._alone()
        if not (streaming and decode_rows and self._target and self._per_token):
            return self.most
        base = self._decode_seconds(decode_rows)
        room = max(self._target, SLOWDOWN * base) - base
        return min(self.most, max(LEAST_TOKENS, int(room / self._per_token)))

    def _alone(self) -> int:
        """A multiple of `most`, where a step may have so many: each size of a product costs a kernel of its own."""
        per_token = max(self._per_token, self._at_start / 2)  # small chunks beside streams may seem to cost nothing
        times = max(1, int(self._lone_seconds / (per_token * self.most)))
        return max(self.most, min(self._most_alone, times * self.most))

    def learn(self, *, prefill_tokens: int, decode_rows: int, planned_at: float, now: float) -> None:
        """A step came back. It began when it was planned, or when the step before it ended."""
        seconds = now - max(planned_at, self._last_end)
        self._last_end = now
        if not prefill_tokens:
            size = decode_rows.bit_length()
            known = self._decode.get(size)
            self._decode[size] = seconds if known is None else known + _WEIGHT * (seconds - known)
        elif prefill_tokens >= LEAST_TOKENS:
            cost = max(seconds - self._decode_seconds(decode_rows), 0.0) / prefill_tokens
            self._per_token = cost if not self._per_token else self._per_token + _WEIGHT * (cost - self._per_token)

    def _decode_seconds(self, rows: int) -> float:
        """Of a step without prompts; from the next smaller number of rows that is known, 0 when there is none."""
        for size in range(rows.bit_length(), 0, -1):
            if size in self._decode:
                return self._decode[size]
        return 0.0


Part = tuple[list[Sequence], int]
ROOM = None
"""The waiting queue's entry among tenants with prompts under way."""


class PrefillSplit:
    """Splits a step's prompt tokens between tenants; they take turns where there are fewer tokens than tenants."""

    def __init__(self, shares: FairShare) -> None:
        self._fair_share = shares
        self._turns: dict[str | None, int] = {}
        """Where there were fewer tokens than tenants with prompts: since which step each waits for its next turn."""
        self._before: dict[str | None, int] = {}
        """The same before the newest step's tokens were dealt out, for the tenants that got one."""

    def of_step(
        self, step: int, tokens: int, others: list[Sequence], first: Sequence | None, *, starts_first: bool
    ) -> list[Part]:
        """Sequences by tenant, and how many of a step's prompt tokens each tenant may take. The tokens are split
        equally; parts that are not needed go to the other tenants. If the first waiting request belongs to a tenant
        without a part, one part is reserved for its admission. Tenants that want single tokens alone come first and
        need no part: their tokens are planned while the step has any.

        Args:
            others: running sequences that want more than a plain position.
            first: the next waiting sequence.
            starts_first: there is a row for it.
        """
        self._before = {}
        running = self._fair_share.running
        if len(running) < 2 and (first is None or first.request.tenant in running):
            return [(others, tokens)]
        lines: dict[str, list[Sequence]] = {}
        wanted: dict[str | None, int] = {}
        prompts = set[str]()
        for sequence in others:
            tenant, count = sequence.request.tenant, max(1, len(sequence.tokens) - sequence.num_computed)
            lines.setdefault(tenant, []).append(sequence)
            wanted[tenant] = wanted.get(tenant, 0) + count
            if count > 1:
                prompts.add(tenant)
        singles = [tenant for tenant in lines if tenant not in prompts]
        for tenant in singles:
            del wanted[tenant]
        if first is not None and starts_first and first.num_wanted > 1 and first.request.tenant not in prompts:
            wanted[ROOM] = len(first.tokens)
        if tokens < len(wanted):
            wanted = self._in_turns(step, tokens, wanted)
        parts = list[Part]()
        for turn, name in enumerate(sorted(wanted, key=lambda name: wanted[name])):
            part = min(wanted[name], -(-tokens // (len(wanted) - turn)))
            tokens -= part
            if name is not ROOM:
                parts.append((lines[name], part))
        return [(lines[tenant], 0) for tenant in singles] + parts

    def _in_turns(self, step: int, tokens: int, wanted: Iterable[str | None]) -> dict[str | None, int]:
        """A token for each of those who wait longest for one. If they went to who wants least, one whose blocks are
        taken again and again could begin again each time, and another one never end."""
        turns = {name: self._turns.get(name, step) for name in wanted}
        chosen = sorted(turns, key=lambda name: turns[name])[:tokens]
        self._before = {name: turns[name] for name in chosen}
        kept = {name: turn for name, turn in self._turns.items() if name is ROOM or name in self._fair_share.running}
        self._turns = kept | turns | dict.fromkeys(chosen, step + 1)
        return {name: 1 if name in chosen else 0 for name in turns}

    def keep_turn(self, tenant: str) -> None:
        """A tenant lacked the blocks for the tokens that it was dealt: its turn is still to come.

        The blocks that it takes from others return with a plan in flight. If its turn were over by then, the waiting
        room's first would take them, lose them again, and neither would ever go on.
        """
        if tenant in self._before:
            self._turns[tenant] = self._before[tenant]
