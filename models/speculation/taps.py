"""Which hidden states of a model a proposer is shown."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Taps:
    """Which hidden states of the model a proposer is shown. Without any it is never asked to `observe`."""

    last: bool = False
    """Those that leave the last layer, before the final norm."""
    layers: tuple[int, ...] = ()
    """Those that leave these layers, in this order: `layers[i]` = 0 is what comes out of the first layer."""

    tokens: bool = False
    """None is needed, but each token that is computed is to be observed all the same: `Observation.hidden` may be
    empty, [tokens, 0]."""

    @property
    def shows(self) -> bool:
        """Whether any states are shown."""
        return self.last or bool(self.layers)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to observe."""
        return self.shows or self.tokens


NO_TAPS: Final = Taps()
