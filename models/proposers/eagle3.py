"""EAGLE-3 (Li, Wei, Zhang and Zhang, 2025): a draft head that reads three layers of the model and predicts tokens.

`fc` makes one vector from the hidden states that enter three layers; the only layer reads it beside the embedding of
the next token. Where the model has not computed hidden states, the head's own output, before the norm, replaces the
vector.

Checkpoint: `fc`, `midlayer` (with `hidden_norm` for the vector and `input_layernorm` for the embedding), `norm`,
`lm_head` over the draft vocabulary, `d2t`, `t2d`, sometimes `embed_tokens`. `d2t` is the difference between each draft
token's id in the model and its place; `t2d` marks the model's tokens that are in the draft vocabulary.
"""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.linear import linear, norm_linear, pack
from troupellm.kernels.rms_norm import rms_norm
from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.layers.attention import Attention, KVPair
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import HEAD, Decoder
from troupellm.models.layers.embedding import Embedding
from troupellm.models.layers.feed_forward import FeedForward
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.memory.drafter_needs import MARK_NUMBERS, DrafterNeeds, Target
from troupellm.models.memory.stored_size import checkpoint_bytes
from troupellm.models.proposers.base import Proposer
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.models.proposers.load import Context, Turns, describe_head, own_decoder, paged, target_of
from troupellm.models.proposers.stored_drafters import open_head, refuse, source_of
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ModelLoadError

FUSION, LAYER, NORM, OWN_EMBEDDING = "fc", "midlayer", "norm.weight", "embed_tokens.weight"
TO_TARGET, IN_DRAFT = "d2t", "t2d"
LAYERS = "eagle_aux_hidden_state_layer_ids"
NUM_LAYERS = 3


class Eagle3:
    """A `Network` that reads states."""

    reads_states = True

    def __init__(
        self,
        config: DecoderConfig,
        target: Decoder,
        source: WeightSource,
        vocabulary: Tensor,
        *,
        aux_hidden_states: AuxHiddenStates,
        normed_residual: bool,
        longest: int,
    ) -> None:
        """
        Args:
            vocabulary: int64 [draft vocabulary], tokens of the target.
            aux_hidden_states: the layers before those whose inputs are read.
            normed_residual: whether the residual begins behind the norm.
        """
        size, self.width = config.hidden_size, config.hidden_size
        self.aux_hidden_states, self.vocabulary, self._eps = aux_hidden_states, vocabulary, config.rms_norm_eps
        self._normed_residual = normed_residual
        own = source.has(OWN_EMBEDDING)
        table = source.take(OWN_EMBEDDING, (config.vocab_size, size)) if own else None
        self._embedding = target.embedding if table is None else Embedding(table, None)
        self._fusion = pack(source.linear(FUSION, (size, NUM_LAYERS * target.config.hidden_size)))
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self._before, self._hidden, self._after = (source.take(f"{LAYER}.{name}.weight", (size,)) for name in names)
        self._attention = Attention(config, 0, f"{LAYER}.self_attn", source, input_size=2 * size)
        self._feed_forward = FeedForward(config, f"{LAYER}.mlp", source, config.layers[0].intermediate_size)
        self._norm = source.take(NORM, (size,))
        self._head = pack(source.linear(HEAD, (vocabulary.numel(), size)))
        self._turns = Turns(config, longest, self._embedding)

    def states(self, aux: Tensor) -> Tensor:
        """As `Network.states`."""
        return linear(aux, self._fusion)

    def forward(self, batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        """As `Network.forward`."""
        assert states is not None
        embedded = self._embedding(batch.token_ids)
        hidden = rms_norm(states, self._hidden, self._eps)
        both = torch.cat((rms_norm(embedded, self._before, self._eps), hidden), dim=-1)
        attended = self._attention(both, batch, self._turns(batch.positions), caches[0], batch.logit_tokens)
        residual = batch.with_logits(hidden if self._normed_residual else states) + attended
        return residual + self._feed_forward(rms_norm(residual, self._after, self._eps), residual.shape[0])

    def scores(self, states: Tensor) -> Tensor:
        """As `Network.scores`."""
        return norm_linear(states, self._norm, self._eps, self._head).float()


def requirements(config: SpeculativeConfig, target: Target) -> DrafterNeeds:
    """The memory needs of the head.

    Raises:
        ModelLoadError: it does not fit this target; the message names the reason.
    """
    folder, reader, layers, aux_hidden_states = _described(config, target)
    stored = open_head(folder, reader, config, target, lambda _: None)
    return DrafterNeeds(
        weight_bytes=checkpoint_bytes(stored, target.dtype, target.device),
        layers=layers,
        width=layers.hidden_size,
        shown=len(aux_hidden_states.layers) * target.config.hidden_size,
        border=layers.hidden_size + MARK_NUMBERS,
    )


def make(config: SpeculativeConfig, context: Context) -> Proposer:
    """Read the head.

    Raises:
        ModelLoadError: it is not one of this target; says why.
    """
    decoder, target = own_decoder(config, context), target_of(context)
    folder, reader, layers, aux_hidden_states = _described(config, target)
    longest = min(target.max_model_len, config.max_model_len or target.max_model_len)
    stored = open_head(folder, reader, config, target, lambda _: None)
    names = {LAYER: "layers.0"} if stored.has("layers.0.hidden_norm.weight") else {}
    source = source_of(stored, config, names, decoder.embedding.device)
    if layers.hidden_size != target.config.hidden_size and not stored.has(OWN_EMBEDDING):
        raise refuse(f"{folder.name}: tensor {OWN_EMBEDDING} is missing, and the target's embedding has another width")
    vocabulary = _vocabulary(stored, reader, layers.vocab_size).to(context.cache.storage.device)
    with batch_invariant(decoder.batch_invariant):
        head = Eagle3(
            layers,
            decoder,
            source,
            vocabulary,
            aux_hidden_states=aux_hidden_states,
            normed_residual=reader.flag("norm_before_residual", False),
            longest=longest,
        )
    stored.finish()
    return paged(head, layers, config, context, longest)


def _described(config: SpeculativeConfig, target: Target) -> tuple[Path, ConfigReader, DecoderConfig, AuxHiddenStates]:
    folder = drafter_folder("eagle3", config.model, target.model, lambda _: None)
    reader = ConfigReader.load(folder)
    layers = describe_head(reader, target.config)
    if layers.num_layers != 1:
        raise reader.refuse("num_hidden_layers", "must be 1")
    if reader.integer("target_hidden_size", target.config.hidden_size) != target.config.hidden_size:
        raise reader.refuse("target_hidden_size", f"must be the target's ({target.config.hidden_size})")
    if not reader.section("eagle_config").flag("use_aux_hidden_state", True):
        raise reader.section("eagle_config").refuse("use_aux_hidden_state", "must be true")
    return (
        folder,
        reader,
        msgspec.structs.replace(layers, head="none"),
        AuxHiddenStates(layers=_aux_layers(reader, target.config)),
    )


def _aux_layers(reader: ConfigReader, target: DecoderConfig) -> tuple[int, ...]:
    """The layers whose outputs are read: those before the ones that are named."""
    count, home = target.num_layers, reader.section("eagle_config")
    home = home if home.has(LAYERS) else reader
    named = home.values.get(LAYERS)
    if named is None:
        named = [2, count // 2, count - 3]
        if count < NUM_LAYERS + 1:
            raise refuse(f"method eagle3 needs {LAYERS} in the head's config.json for a target of {count} layers")
    whole = isinstance(named, list) and all(isinstance(layer, int) and 0 < layer <= count for layer in named)
    if not whole or len(named) != NUM_LAYERS:
        raise home.refuse(LAYERS, f"must be {NUM_LAYERS} numbers of layers from 1 to {count}")
    return tuple(layer - 1 for layer in named)


def _vocabulary(stored: Checkpoint, reader: ConfigReader, vocab: int) -> Tensor:
    size = reader.integer("draft_vocab_size", vocab)
    places = torch.arange(size)
    stored.ignore(IN_DRAFT)
    if not stored.has(TO_TARGET):
        if size != vocab:
            raise refuse(f"tensor {TO_TARGET} is missing, and draft_vocab_size {size} is not vocab_size {vocab}")
        return places
    found = places + stored.raw(TO_TARGET, (size,), "I64", "I32").long()
    if bool((found < 0).any()) or bool((found >= vocab).any()) or len(set(found.tolist())) != size:
        raise ModelLoadError(f"speculative_config: tensor {TO_TARGET} must name {size} different tokens below {vocab}")
    return found
