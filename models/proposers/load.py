"""Shared code for making drafters that have layers of their own."""

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.layers.attention import Angles
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.layers.decoder import Decoder, RunnableDecoder
from troupellm.models.layers.embedding import Embedding
from troupellm.models.layers.rope import rope_tables, rotation_of
from troupellm.models.memory.drafter_needs import MARK_NUMBERS, Target
from troupellm.models.proposers.base import Observation, ProposalBatch, Proposer, RowDraws
from troupellm.models.proposers.choose_drafts import Guesser
from troupellm.models.proposers.paged_attention import Paging, lying_in, own_windows
from troupellm.models.proposers.paged_base import Network
from troupellm.models.proposers.paged_drafter_blocks import DrafterBlocks
from troupellm.models.proposers.paged_proposer import PagedProposer
from troupellm.models.proposers.stored_drafters import refuse
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import NewRow, SamplingState

WARM_ROUNDS, WARM_TOKENS = 3, 4
"""Two drafts each."""


class Context(Protocol):
    """The part of `registry.ProposerContext` that is read here."""

    @property
    def decoder(self) -> RunnableDecoder: ...
    @property
    def cache(self) -> KVCache: ...
    @property
    def folder(self) -> Path: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_model_len(self) -> int: ...


def target_of(context: Context) -> Target:
    """The model that is drafted for."""
    return Target(
        folder=context.folder,
        model=context.model,
        config=context.decoder.config,
        dtype=context.dtype,
        device=context.cache.storage.device,
        max_model_len=context.max_model_len,
    )


def own_decoder(config: SpeculativeConfig, context: Context) -> Decoder:
    """The target, whose hidden states, embedding and head are read.

    Raises:
        ModelLoadError: it does not show them.
    """
    if not isinstance(context.decoder, Decoder):
        raise refuse(
            f"method {config.method} reads hidden states, which a model run by the code of transformers does not show",
            "method ngram, suffix or draft_model",
        )
    return context.decoder


def paged(
    network: Network, layers: DecoderConfig, config: SpeculativeConfig, context: Context, longest: int
) -> PagedProposer:
    """A proposer for a network whose layers lie in the context's cache."""
    device = context.cache.storage.device
    paging = Paging(layers, context.cache, context.dtype, batch_invariant=context.decoder.batch_invariant)
    guesser = Guesser(
        context.decoder.config.vocab_size,
        network.vocabulary,
        coupled=config.draft_sample_method == "probabilistic",
        device=device,
    )
    borders, layout = context.cache.borders, context.cache.layout
    assert borders is not None, "a drafter with layers of its own marks its blocks"
    kept_whole = layout.windows[lying_in(layout)] is None  # else a row's first blocks are others' by and by
    proposer = PagedProposer(
        network,
        paging,
        context.cache.draft_layers,
        guesser,
        longest=longest,
        dtype=context.dtype,
        widths=config.tree_widths,
        borders=borders[:, :-MARK_NUMBERS] if network.reads_states else None,
        marks=DrafterBlocks(context.cache, paging) if kept_whole else None,
    )
    warm_up(proposer, context)
    return proposer


@torch.inference_mode()
def warm_up(proposer: Proposer, context: Context) -> None:
    """Draft once for a made-up row, before the cache is in use: later measurements then exclude first-time costs."""
    device, size = context.cache.storage.device, context.cache.block_size
    tokens = torch.zeros(1, WARM_TOKENS + size, dtype=torch.int32, device=device)
    blocks = np.zeros((len(context.cache.layout.windows), 1, -(-tokens.shape[1] // size)), dtype=np.int32)
    new = NewRow(
        row=0, epoch=0, request_id="", token_ids=bytes(8), num_prompt_tokens=1, sampling=SamplingState(), blocks=()
    )
    slots, counts = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    aux_hidden_states, config = proposer.aux_hidden_states, context.decoder.config
    width = config.hidden_size * (len(aux_hidden_states.layers) + aux_hidden_states.last)
    hidden = torch.zeros(1, width, dtype=context.dtype, device=device)
    draws = RowDraws(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float32))
    for _ in range(WARM_ROUNDS):
        proposer.add_row(0, new)
        proposer.observe(Observation(slots, slots, counts, hidden, tokens, blocks))
        proposer.propose(ProposalBatch(slots, counts + 1, counts + 1, tokens, blocks, draws))
    proposer.reset()


def describe_head(reader: ConfigReader, target: DecoderConfig) -> DecoderConfig:
    """The layers of an EAGLE head: those of a Llama, by its config.json; what that leaves out is as in the target.

    Raises:
        ModelLoadError: a value is wrong, or does not fit the target.
    """
    known = reader.with_values(architectures=["LlamaForCausalLM"]).with_defaults(
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
    )
    bias = known.flag("attention_bias", False)
    found = decoder_config(
        known, qkv_bias=known.flag("qkv_bias", bias), out_bias=bias, mlp_bias=known.flag("mlp_bias", False)
    )
    if found.vocab_size != target.vocab_size:
        raise reader.refuse("vocab_size", f"must be the target's ({target.vocab_size})")
    windows = own_windows(found, cache_layout(target))
    return msgspec.structs.replace(found, hybrid_cache=False).with_layers(window=windows)


class Turns:
    """Rotations of a drafter's layers, which are all alike."""

    def __init__(self, config: DecoderConfig, longest: int, like: Embedding) -> None:
        rotation = rotation_of(config.layers[0])
        assert rotation is not None, "a drafter's layers are rotated"
        cos, sin = rope_tables(*rotation, longest, like.dtype)
        self._cos, self._sin = cos.to(like.device), sin.to(like.device)
        self.tables = [(self._cos, self._sin)]
        """Of all positions, the only kind of rotation."""

    def __call__(self, positions: torch.Tensor) -> Angles:
        """At some positions."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
