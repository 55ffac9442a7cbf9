"""What a drafter that is a model computes, whatever it is made of."""

from typing import Protocol

from torch import Tensor

from troupellm.models.forward_batch import ForwardBatch
from troupellm.models.layers.attention import KVPair
from troupellm.models.speculation.taps import Taps


class Network(Protocol):
    """Goes through some layers with a cache of their own, from one entry per token to what the next token may be.

    A network *that reads states* has for position p the entry (state of the model at p, token at p + 1), and tells the
    token at p + 2. Its own states stand for those of the model where that has not computed any. Another one has for
    position p the token at p, and tells the one at p + 1.
    """

    taps: Taps
    """What it reads of the model."""
    reads_states: bool
    width: int
    """Of its states."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [scores]: which of the model's tokens each score is of; None: score i is of token i."""

    def states(self, tapped: Tensor) -> Tensor:
        """What entries are made from [tokens, width], of what was tapped [tokens, ...]."""

    def forward(self, batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        """The network's states [logit tokens, width]; keys and values of all tokens are written to `caches`.

        Args:
            states: [tokens, width] for one that reads them.
        """

    def scores(self, states: Tensor) -> Tensor:
        """float32 [rows, scores] of states that `forward` gave, for the draft that follows."""
