"""How the prompt tokens of one step are dealt out among tenants."""

from troupellm.actors.scheduler.sequence import Sequence
from troupellm.actors.scheduler.shares import Shares


class PromptParts:
    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._kept_at = -1
        """The last step of which a token was kept for who waits, where there were fewer tokens than tenants."""

    def of_step(
        self, step: int, tokens: int, others: list[Sequence], first: Sequence | None, *, starts_first: bool
    ) -> list[tuple[list[Sequence], int]]:
        """Sequences by tenant, and how many of a step's prompt tokens each tenant may take: equal parts, of which what
        one does not need goes to the others. The waiting room's first has a part too if its tenant has none yet, which
        is left over for its admission.

        Args:
            others: running sequences that want more than a plain position.
            first: who is served next of those who wait.
            starts_first: there is a row for it.
        """
        running = self._shares.running
        if len(running) < 2 and (first is None or first.request.tenant in running):
            return [(others, tokens)]
        lines: dict[str, list[Sequence]] = {}
        wanted: dict[str, int] = {}
        for sequence in others:
            tenant = sequence.request.tenant
            lines.setdefault(tenant, []).append(sequence)
            wanted[tenant] = wanted.get(tenant, 0) + max(1, len(sequence.tokens) - sequence.num_computed)
        if first is not None and starts_first:
            wanted.setdefault(first.request.tenant, len(first.tokens))
        if tokens < len(wanted):
            wanted = self._in_turns(step, tokens, wanted, lines, first)
        parts = []
        for turn, tenant in enumerate(sorted(wanted, key=lambda tenant: wanted[tenant])):
            part = min(wanted[tenant], -(-tokens // (len(wanted) - turn)))
            tokens -= part
            if tenant in lines:
                parts.append((lines[tenant], part))
        return parts

    def _in_turns(
        self, step: int, tokens: int, wanted: dict[str, int], lines: dict[str, list[Sequence]], first: Sequence | None
    ) -> dict[str, int]:
        """A token for each of those tenants who were served longest ago. If they went to who wants least, one whose
        blocks are taken again and again could begin again each time, and another one never end."""

        def last_turn(tenant: str) -> int:
            if tenant in lines:
                return min(sequence.last_step for sequence in lines[tenant])
            return self._kept_at if first is None else max(first.last_step, self._kept_at)

        chosen = sorted(wanted, key=last_turn)[:tokens]
        if any(tenant not in lines for tenant in chosen):
            self._kept_at = step
        return {tenant: 1 if tenant in chosen else 0 for tenant in wanted}
