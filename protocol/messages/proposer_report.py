"""The worker's report on its proposer, beside the drafts."""

import msgspec


class ProposerReport(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """How a proposer stands; told when anything of it has changed. Numbers that count something count since it was
    made."""

    life: int = 0
    """Of this proposer alone: one that is made anew counts from zero, under another number."""
    failures: int = 0
    """Times that a plug-in raised, or gave what no drafts are."""
    past_outputs: int = 0
    """Outputs of earlier requests that it keeps to draft from."""
    past_tokens: int = 0
    """In these."""
    past_tokens_capacity: int = 0
    """That it keeps at most; 0: it keeps no outputs."""
    past_evictions: int = 0
    """Outputs that gave way to later ones."""
    memory_bytes: int = 0
    """That its texts and their indexes have reserved."""
