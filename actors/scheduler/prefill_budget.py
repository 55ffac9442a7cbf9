"""How many prompt tokens a step computes: no more than fill the device, and no more than running streams can bear.

A step beyond what saturates the device takes longer without doing more per second, so prompts that come together would
all get their first tokens at its end instead of one after another. While a request streams, a step should not take
longer than the inter-token target. It may always take twice as long as one without prompts, so that prompts cannot
starve either. On a CPU, a prompt without other work takes longer steps, as long as they remain short: the fixed cost of
a step is then paid less often. New requests wait for the steps that are under way.
"""

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


class PrefillBudget:
    """Learns what steps cost from how long they took. Times are seconds."""

    def __init__(self, config: SchedulerConfig, ready: WorkerReady) -> None:
        wanted = config.max_num_prefill_tokens
        if wanted == "auto":
            wanted = ready.saturation_tokens or config.max_num_batched_tokens
        self.most = min(wanted, config.max_num_batched_tokens)
        """Tokens, without regard to streams."""
        # # On a GPU the log-probabilities of a long step's prompt would take memory that is not reserved.
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
