"""A model's own layers for multi-token prediction, as in DeepSeek-V3 (2024, section 2.2).

The layer behind the last one reads the normed hidden state of a position beside the normed embedding of the token after
it, and has its own norm before the model's output matrix. For longer drafts it is applied repeatedly.

Checkpoint: `model.layers.{num_hidden_layers}.` with `enorm`, `hnorm`, `eh_proj`, a whole layer, and `shared_head`;
copies of the embedding and the output matrix, which are the model's, are not read, nor are layers behind the first.
"""

import msgspec
import torch
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.linear import linear, pack
from troupellm.kernels.rms_norm import rms_norm
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.layers.attention import KVPair
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.block import DecoderLayer
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.layers.decoder import Decoder
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.load.architecture import read_config
from troupellm.models.memory.drafter_needs import DrafterNeeds, Target
from troupellm.models.proposers.base import Proposer
from troupellm.models.proposers.load import Context, Turns, own_decoder, paged, target_of
from troupellm.models.proposers.paged_attention import own_windows
from troupellm.models.proposers.stored_drafters import needs_of, open_head, refuse, source_of
from troupellm.protocol.config.speculation import SpeculativeConfig

FAMILIES = ("DeepseekV3ForCausalLM",)
COUNT = "num_nextn_predict_layers"


class NextTokenLayer:
    """A `Network` that reads states."""

    aux_hidden_states = AuxHiddenStates(last=True)
    reads_states = True
    vocabulary: Tensor | None = None

    def __init__(
        self, config: DecoderConfig, target: Decoder, source: WeightSource, prefix: str, *, longest: int
    ) -> None:
        """
        Args:
            source: whose layer 0 it is.
            prefix: of its other tensors.
        """
        size = config.hidden_size
        self.width, self._target, self._eps = size, target, config.rms_norm_eps
        names = ("enorm", "hnorm", "shared_head.norm")
        self._embedded, self._hidden, self._norm = (source.take(f"{prefix}{name}.weight", (size,)) for name in names)
        self._fusion = pack(source.linear(f"{prefix}eh_proj", (size, 2 * size)))
        self._layer = DecoderLayer(config, 0, source)
        self._turns = Turns(config, longest, target.embedding)

    def states(self, aux: Tensor) -> Tensor:
        """As `Network.states`."""
        return self._target.normed(aux)

    def forward(self, batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        """As `Network.forward`; its states are normed like the model's."""
        assert states is not None
        embedded = self._target.embedding(batch.token_ids)
        both = (rms_norm(embedded, self._embedded, self._eps), rms_norm(states, self._hidden, self._eps))
        residual = linear(torch.cat(both, dim=-1), self._fusion)
        angles = self._turns(batch.positions)
        update, residual = self._layer(None, residual, batch, angles, caches[0], batch.logit_tokens)
        return rms_norm(residual if update is None else residual.add_(update), self._norm, self._eps)

    def scores(self, states: Tensor) -> Tensor:
        """As `Network.scores`."""
        return self._target.scores(states)


def requirements(config: SpeculativeConfig, target: Target) -> DrafterNeeds:
    """The memory needs of the layer.

    Raises:
        ModelLoadError: the model has no such layer.
    """
    reader, layers, prefix = _described(target)
    stored = open_head(target.folder, reader, config, target, lambda _: None)
    return needs_of(stored, layers, target, prefix)


def make(config: SpeculativeConfig, context: Context) -> Proposer:
    """Read the layer.

    Raises:
        ModelLoadError: the model has none.
    """
    decoder, target = own_decoder(config, context), target_of(context)
    reader, layers, prefix = _described(target)
    longest = min(target.max_model_len, config.max_model_len or target.max_model_len)
    stored = open_head(target.folder, reader, config, target, lambda _: None)
    source = source_of(stored, config, {"model.layers.0.": prefix}, decoder.embedding.device)
    with batch_invariant(decoder.batch_invariant):
        layer = NextTokenLayer(layers, decoder, source, prefix, longest=longest)
    return paged(layer, layers, config, context, longest)


def _described(target: Target) -> tuple[ConfigReader, DecoderConfig, str]:
    model = target.config
    if model.architecture not in FAMILIES or is_gguf(target.folder):
        raise refuse(
            f"method mtp: {model.architecture} has no layers for further tokens here",
            f"those of {', '.join(FAMILIES)} are read, from safetensors; see the other methods",
        )
    reader = read_config(target.folder).reader
    if not reader.integer(COUNT, 0, least=0):
        raise refuse(f"method mtp: {COUNT} is 0 in the model's config.json", "see the other methods")
    one = msgspec.structs.replace(model, layers=model.layers[-1:], hybrid_cache=False).with_layers(window=None)
    one = one.with_layers(window=own_windows(one, cache_layout(model)))
    return reader, one, f"model.layers.{model.num_layers}."
