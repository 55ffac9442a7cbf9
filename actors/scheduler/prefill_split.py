"""How the prompt tokens of one step are dealt out among tenants."""

from collections.abc import Iterable

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.sequences.sequence import Sequence

Part = tuple[list[Sequence], int]
ROOM = None
"""The waiting queue's entry among tenants with prompts under way."""


class PrefillSplit:
    """Splits a step's prompt tokens between tenants; they take turns where there are fewer tokens than tenants."""

    def __init__(self, fair_share: FairShare) -> None:
        self._fair_share = fair_share
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
