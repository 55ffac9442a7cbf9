"""EAGLE (Li, Wei, Zhang and Zhang, 2024): a draft head that continues the sequence of the model's features.

The feature of a position is the model's hidden state after its final norm. From it and the embedding of the token after
it, the head predicts the next feature; the model's own output matrix turns features into logits.

Checkpoint: `fc`, `layers.N` as in Llama but for the first one's missing `input_layernorm`; the embedding is the
model's, and a copy of it in the file is not read.
"""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.fused_decoder.layers import decoder_layers
from troupellm.kernels.linear import linear, pack
from troupellm.kernels.paged_attention.cpu import takes_compiled
from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, LayerNorms
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.layers.attention import KVPair
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.block import DecoderLayer
from troupellm.models.layers.decoder import EMBEDDING, HEAD, Decoder
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.memory.drafter_needs import DrafterNeeds, Target
from troupellm.models.proposers.base import Proposer
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.models.proposers.load import Context, Turns, describe_head, own_decoder, paged, target_of
from troupellm.models.proposers.stored_drafters import needs_of, open_head, source_of
from troupellm.protocol.config.speculation import SpeculativeConfig

FUSION = "fc"


class Eagle:
    """A `Network` that reads states."""

    aux_hidden_states = AuxHiddenStates(last=True)
    reads_states = True
    vocabulary: Tensor | None = None

    def __init__(
        self, config: DecoderConfig, target: Decoder, source: WeightSource, *, bias: bool, longest: int
    ) -> None:
        """
        Args:
            source: by the names of a Llama, and `fc`.
            bias: whether `fc` has one.
        """
        size = config.hidden_size
        self.width, self._target = size, target
        weight = source.linear(FUSION, (size, 2 * size))
        self._fusion = pack(weight, source.take(f"{FUSION}.bias", (size,)) if bias else None)
        bare = msgspec.structs.replace(config, norms=LayerNorms(before_attention=None))
        self._layers = [DecoderLayer(config if layer else bare, layer, source) for layer in range(config.num_layers)]
        self._head = None
        if source.has(f"{HEAD}.weight"):
            self._head = pack(source.linear(HEAD, (config.vocab_size, size)))
        self._turns = Turns(config, longest, target.embedding)
        parts = [layer.parts(0) for layer in self._layers]
        known = [part for part in parts if part is not None]
        fits = len(known) == len(parts) and target.embedding.dtype == torch.float32
        self._together = decoder_layers(known) if fits and target.embedding.device.type == "cpu" else None
        """All layers in one compiled call, for few entries; None where there is no such thing."""

    def states(self, aux: Tensor) -> Tensor:
        """As `Network.states`."""
        return self._target.normed(aux)

    def forward(self, batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        """As `Network.forward`."""
        assert states is not None
        embedded = self._target.embedding(batch.token_ids)
        residual, update = linear(torch.cat((embedded, states), dim=-1), self._fusion), None
        plans = [group.plan for group in batch.groups]
        if self._together is not None and self._together.takes(residual.shape[0], plans, caches):
            views = [(group.plan, group.kv_rows) for group in batch.groups if takes_compiled(group.plan)]
            tables = self._turns.tables
            return self._together.run(residual, batch.positions, views, tables, caches, batch.logit_tokens)
        angles = self._turns(batch.positions)
        for layer, cache in zip(self._layers[:-1], caches, strict=False):
            update, residual = layer(update, residual, batch, angles, cache)
        update, residual = self._layers[-1](update, residual, batch, angles, caches[-1], batch.logit_tokens)
        return residual if update is None else residual.add_(update)

    def scores(self, states: Tensor) -> Tensor:
        """As `Network.scores`."""
        return self._target.scores(states) if self._head is None else linear(states, self._head).float()


def requirements(config: SpeculativeConfig, target: Target) -> DrafterNeeds:
    """The memory needs of the head.

    Raises:
        ModelLoadError: it does not fit this target; the message names the reason.
    """
    folder, reader, layers = _described(config, target)
    stored = open_head(folder, reader, config, target, lambda _: None)
    _ignore(stored)
    return needs_of(stored, layers, target)


def make(config: SpeculativeConfig, context: Context) -> Proposer:
    """Read the head.

    Raises:
        ModelLoadError: it is not one of this target; says why.
    """
    decoder, target = own_decoder(config, context), target_of(context)
    folder, reader, layers = _described(config, target)
    longest = min(target.max_model_len, config.max_model_len or target.max_model_len)
    stored = open_head(folder, reader, config, target, lambda _: None)
    _ignore(stored)
    prefix = "model." if stored.has(f"model.{FUSION}.weight") else ""
    source = source_of(stored, config, {"model.": prefix, FUSION: prefix + FUSION}, decoder.embedding.device)
    bias = source.has(f"{FUSION}.bias")
    with batch_invariant(decoder.batch_invariant):
        head = Eagle(layers, decoder, source, bias=bias, longest=longest)
    stored.finish()
    return paged(head, layers, config, context, longest)


def _described(config: SpeculativeConfig, target: Target) -> tuple[Path, ConfigReader, DecoderConfig]:
    folder = drafter_folder("eagle", config.model, target.model, lambda _: None)
    reader = ConfigReader.load(folder)
    if reader.flag("add_para_norm", False):
        raise reader.refuse("add_para_norm", "must be false")
    layers = describe_head(reader, target.config)
    if layers.hidden_size != target.config.hidden_size:
        raise reader.refuse("hidden_size", f"must be the target's ({target.config.hidden_size})")
    return folder, reader, layers


def _ignore(stored: Checkpoint) -> None:
    """The copy of the target's embedding."""
    for name in (EMBEDDING, EMBEDDING.removeprefix("model.")):
        stored.ignore(name)
