"""How the prompt tokens of one step are dealt out among tenants."""

from troupellm.actors.scheduler.sequence import Sequence
from troupellm.actors.scheduler.shares import Shares


def parts_of(
    tokens: int, others: list[Sequence], first: Sequence | None, shares: Shares, *, starts_first: bool
) -> list[tuple[list[Sequence], int]]:
    """Sequences by tenant, and how many of a step's prompt tokens each tenant may take: equal parts, of which what one
    does not need goes to the others. The waiting room's first has a part too if its tenant has none yet, which is left
    over for its admission.

    Args:
        others: running sequences that want more than a plain position.
        first: who is served next of those who wait.
        starts_first: there is a row for it.
    """
    if len(shares.running) < 2 and (first is None or first.request.tenant in shares.running):
        return [(others, tokens)]
    lines: dict[str, list[Sequence]] = {}
    wanted: dict[str, int] = {}
    for sequence in others:
        tenant = sequence.request.tenant
        lines.setdefault(tenant, []).append(sequence)
        wanted[tenant] = wanted.get(tenant, 0) + max(1, len(sequence.tokens) - sequence.num_computed)
    if first is not None and starts_first:
        wanted.setdefault(first.request.tenant, len(first.tokens))
    parts = []
    for turn, tenant in enumerate(sorted(wanted, key=lambda tenant: wanted[tenant])):
        part = min(wanted[tenant], -(-tokens // (len(wanted) - turn)))
        tokens -= part
        if tenant in lines:
            parts.append((lines[tenant], part))
    return parts
