"""The hidden states of a model that a proposer gets."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """The hidden states of the model that a proposer gets in `observe`. Without any, `observe` is never called."""

    last: bool = False
    """The output of the last layer, before the final norm."""
    layers: tuple[int, ...] = ()
    """The outputs of these layers, in this order: 0 is the output of the first layer."""

    tokens: bool = False
    """No states are needed, and yet `observe` is called for all computed tokens: `Observation.hidden` may be
    empty, [tokens, 0]."""

    @property
    def shows(self) -> bool:
        """True if any states are wanted."""
        return self.last or bool(self.layers)

    @property
    def wanted(self) -> bool:
        """True if `observe` is to be called."""
        return self.shows or self.tokens


NO_AUX_HIDDEN_STATES: Final = AuxHiddenStates()
