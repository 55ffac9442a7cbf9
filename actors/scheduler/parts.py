"""How the prompt tokens of one step are dealt out among tenants."""

from collections.abc import Iterable

from troupellm.actors.scheduler.sequence import Sequence
from troupellm.actors.scheduler.shares import Shares


class PromptParts:
    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._turns: dict[str, int] = {}
        """Where there were fewer tokens than tenants who wanted some: since which step each waits for its next turn."""

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
        prompts = list[str]()
        for sequence in others:
            tenant, count = sequence.request.tenant, max(1, len(sequence.tokens) - sequence.num_computed)
            lines.setdefault(tenant, []).append(sequence)
            wanted[tenant] = wanted.get(tenant, 0) + count
            if count > 1:  # a single token is planned whatever is left of these
                prompts.append(tenant)
        if first is not None and starts_first:
            wanted.setdefault(first.request.tenant, len(first.tokens))
            prompts.append(first.request.tenant)
        if tokens < len(set(prompts)):
            wanted = self._in_turns(step, tokens, wanted, dict.fromkeys(prompts))
        parts = []
        for turn, tenant in enumerate(sorted(wanted, key=lambda tenant: wanted[tenant])):
            part = min(wanted[tenant], -(-tokens // (len(wanted) - turn)))
            tokens -= part
            if tenant in lines:
                parts.append((lines[tenant], part))
        return parts

    def _in_turns(
        self, step: int, tokens: int, wanted: Iterable[str], prompts: Iterable[str]
    ) -> dict[str, int]:  # fmt: skip
        """A token for each of those tenants with prompts who wait longest for one. If they went to who wants least, one
        whose blocks are taken again and again could begin again each time, and another one never end."""
        turns = {tenant: self._turns.get(tenant, step) for tenant in prompts}
        chosen = sorted(turns, key=lambda tenant: turns[tenant])[:tokens]
        self._turns = turns | dict.fromkeys(chosen, step + 1)
        return {tenant: 1 if tenant in chosen else 0 for tenant in wanted}
