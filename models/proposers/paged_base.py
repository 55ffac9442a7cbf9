"""The interface of a drafter that is a neural network, of any architecture."""

from typing import Protocol

from torch import Tensor

from troupellm.models.layers.attention import KVPair
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.forward_batch import ForwardBatch


class Network(Protocol):
    """Runs some layers with a cache of their own, from one entry per token to scores of a later token.

    A network *that reads states* has for position p the entry (hidden state of the model at p, token at p + 1), and
    predicts the token at p + 2. Where the model has not computed a state, the network's own one replaces it. Any other
    network has for position p the token at p, and predicts the token at p + 1.
    """

    aux_hidden_states: AuxHiddenStates
    """The model's hidden states that it reads."""
    reads_states: bool
    width: int
    """Width of its own hidden states."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [scores]: the model's token id of each score; None: score i is of token i."""

    def states(self, aux: Tensor) -> Tensor:
        """Turn the aux hidden states [tokens, ...] into the states of its entries [tokens, width]."""

    def forward(self, batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        """The network's states [logit tokens, width]; keys and values of all tokens are written to `caches`.

        Args:
            states: [tokens, width] for one that reads them.
        """

    def scores(self, states: Tensor) -> Tensor:
        """float32 [rows, scores] of states that `forward` gave, for the draft that follows."""
