"""The outcome of verification, as a pair of counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Verifications and the drafts they accepted."""

    verified: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """Mean acceptance length: accepted drafts per verification, and the model's own token."""
        return 1 + self.accepted / max(1, self.verified)
