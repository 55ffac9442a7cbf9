"""The states of sequences and of prefixes, in slots that the scheduler names by number."""

from collections.abc import Sequence

import torch
from torch import Tensor

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.states import conv_taps, state_parts
from troupellm.protocol.messages.copies import NO_STATE, StateCopy

CPU = torch.device("cpu")


class StateCache:
    """One tensor per part of a layer's state.

    Attributes:
        num_slots: states that there is room for.
        layers: by layer that has a state, its parts [slots, ...], as `state_parts` names them.
    """

    def __init__(self, config: DecoderConfig, num_slots: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        """Reserve the memory, in which all states are zero. dtype: of the model."""
        self.num_slots = num_slots
        self.taps = conv_taps(config)
        """Of the convolutions."""
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        for layer in range(config.num_layers):
            if parts := state_parts(config, layer):
                shapes = [((num_slots, *part.shape), part.dtype or dtype) for part in parts]
                self.layers[layer] = tuple(torch.zeros(shape, dtype=kind, device=device) for shape, kind in shapes)
        self.parts = [part for parts in self.layers.values() for part in parts]

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Make a plan's copies; all sources are read before any target is written."""
        moved = [copy for copy in copies if copy.source != NO_STATE]
        begun = [copy.target for copy in copies if copy.source == NO_STATE]
        sources, targets = [copy.source for copy in moved], [copy.target for copy in moved]
        for part in self.parts:
            if moved:
                part[targets] = part[sources]
            if begun:
                part[begun] = 0

    def fill(self, slots: Sequence[int] | slice, value: float) -> None:
        """For debugging: overwrite some states."""
        for part in self.parts:
            part[slots] = value
