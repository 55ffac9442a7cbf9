"""Medusa (Cai et al., 2024): heads that each predict one further token from the same hidden state.

Head i reads the hidden state, after the final norm, from which the model drew its last token, and predicts the token
i + 1 places after that one. The heads keep nothing in the cache.

Checkpoint, by Medusa's own names: `{head}.{block}.linear.weight` and `.bias` of residual blocks, then
`{head}.{blocks}.weight`, an output matrix; or by vLLM's: `blocks.{head}.layers.{block}` and `lm_heads.{head}`. Heads
without an output matrix share the model's.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.linear import PackedLinear, linear, pack
from troupellm.models.batch.host_device import to_device, to_host
from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import Decoder
from troupellm.models.memory.drafter_needs import DrafterNeeds, Target
from troupellm.models.memory.stored_size import checkpoint_bytes
from troupellm.models.proposers.base import Observation, ProposalBatch, Proposer, RowDraws
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.models.proposers.choose_drafts import Guesser
from troupellm.models.proposers.draft_trees import Trees
from troupellm.models.proposers.load import Context, own_decoder, target_of, warm_up
from troupellm.models.proposers.paged_attention import Ints
from troupellm.models.proposers.stored_drafters import open_head, refuse, source_of
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import NewRow

MOST_HEADS = 16
MOST_CANDIDATES = 16
"""Most candidates of one head, for a level of a tree."""


class Heads:
    """The heads alone."""

    def __init__(self, target: Decoder, source: WeightSource, names: "_Names", heads: int, blocks: int) -> None:
        size, vocab = target.config.hidden_size, target.config.vocab_size
        self._target = target
        self._blocks: list[list[PackedLinear]] = []
        self._outputs: list[PackedLinear | None] = []
        for head in range(heads):
            made = []
            for block in range(blocks):
                name = names.block(head, block)
                bias = source.take(f"{name}.bias", (size,)) if source.has(f"{name}.bias") else None
                made.append(pack(source.linear(name, (size, size)), bias))
            self._blocks.append(made)
            output = names.output(head, blocks)
            has = source.has(f"{output}.weight")
            self._outputs.append(pack(source.linear(output, (vocab, size))) if has else None)

    def __len__(self) -> int:
        return len(self._blocks)

    def scores(self, states: Tensor, first: int, count: int = 1) -> Tensor:
        """float32 [count * rows, vocab] of some heads, head after head."""
        foretold = []
        for head in range(first, first + count):
            found = states
            for block in self._blocks[head]:
                found = found + functional.silu(linear(found, block))
            foretold.append(found)
        if all(output is None for output in self._outputs):
            return self._target.scores(torch.cat(foretold))
        outputs = self._outputs[first : first + count]
        return torch.cat(
            [
                self._target.scores(found) if output is None else linear(found, output).float()
                for found, output in zip(foretold, outputs, strict=True)
            ]
        )


class Medusa:
    """A `Proposer`."""

    aux_hidden_states = AuxHiddenStates(last=True)

    def __init__(
        self, heads: Heads, target: Decoder, guesser: Guesser, *, longest: int, widths: tuple[int, ...] = ()
    ) -> None:
        """
        Args:
            longest: tokens of a row, its drafts included.
            widths: nodes per level of a tree; empty drafts chains.
        """
        self._heads, self._target, self._guesser = heads, target, guesser
        self._longest, self._widths = longest, widths
        self.most = sum(widths) or len(heads)
        """Drafts of a row in a step."""
        self._states = target.embedding.new_empty(0, target.config.hidden_size)
        self._ready: Ints = np.zeros(0, dtype=np.int64)
        """Tokens that the row had when its state was kept; 0 is none."""

    def add_row(self, slot: int, new: NewRow) -> None:
        """As `Proposer.add_row`."""
        missing = slot + 1 - self._ready.size
        if missing > 0:
            more = max(missing, self._ready.size)
            self._ready = np.concatenate((self._ready, np.zeros(more, dtype=np.int64)))
            self._states = torch.cat((self._states, self._states.new_zeros(more, self._states.shape[1])))
        self._ready[slot] = 0

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """As `Proposer.drop_row`."""
        self._ready[slot] = 0

    def reset(self) -> None:
        """As `Proposer.reset`."""
        self._ready[:] = 0

    @torch.inference_mode()
    def observe(self, seen: Observation) -> None:
        """As `Proposer.observe`: the last state of each row is kept."""
        device = self._states.device
        last = to_device(np.cumsum(seen.counts) - 1, device)
        self._states[to_device(seen.slots, device)] = seen.hidden[last]
        self._ready[seen.slots] = seen.starts + seen.counts + 1

    def miss(self, slots: Ints, starts: Ints) -> None:
        """As `Sleeper.miss`: the next state that is seen is as good as any."""

    @torch.inference_mode()
    def propose(self, batch: ProposalBatch) -> Drafts:
        """As `Proposer.propose`."""
        limits = np.minimum(np.minimum(batch.limits, self._longest - batch.lengths), self.most)
        limits = np.where(self._ready[batch.slots] == batch.lengths, np.maximum(limits, 0), 0)
        if not limits.any():
            return Drafts(np.zeros((limits.size, 0), dtype=np.int32), np.zeros_like(limits))
        states = self._target.normed(self._states[to_device(batch.slots, self._states.device)])
        draws = batch.draws.to(states.device)
        if self._widths:
            return self._trees(states, draws, batch.lengths, limits)
        width, rows = int(limits.max()), limits.size
        positions = to_device((batch.lengths + np.arange(width)[:, None]).reshape(-1), states.device)
        every = RowDraws(draws.streams.repeat(width), draws.inverse_temperature.repeat(width), draws.greedy)
        tokens = self._guesser.one(self._heads.scores(states, 0, width), every, positions)
        return Drafts(to_host(tokens.view(width, rows).T).astype(np.int32), limits)

    def _trees(self, states: Tensor, draws: RowDraws, lengths: Ints, limits: Ints) -> Drafts:
        """The jointly likeliest nodes of each level, with any parents: the heads' predictions are independent."""
        trees, parents = Trees(limits.size), 1
        for head, width in enumerate(self._widths):
            positions = to_device(lengths + head, states.device)
            scores = self._heads.scores(states, head)
            count = min(width, MOST_CANDIDATES, scores.shape[1])
            chosen, shares = (to_host(part) for part in self._guesser.several(scores, draws, positions, count))
            shape = (limits.size, parents, count)
            level, _ = trees.grow(
                np.broadcast_to(chosen[:, None], shape),
                np.broadcast_to(shares[:, None], shape).astype(np.float32),
                width,
            )
            parents = level.shape[1]
        return trees.cut(limits)


class _Names:
    """The names of a checkpoint's tensors."""

    def __init__(self, stored: Checkpoint) -> None:
        names = list(stored.names())
        self._prefix = next((part for part in ("medusa_heads.", "medusa_head.") if _starts(names, part)), "")
        self._vllm = _starts(names, f"{self._prefix}blocks.")

    def block(self, head: int, block: int) -> str:
        if self._vllm:
            return f"{self._prefix}blocks.{head}.layers.{block}"
        return f"{self._prefix}{head}.{block}.linear"

    def output(self, head: int, blocks: int) -> str:
        return f"{self._prefix}lm_heads.{head}" if self._vllm else f"{self._prefix}{head}.{blocks}"


def _starts(names: list[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def requirements(config: SpeculativeConfig, target: Target) -> DrafterNeeds:
    """The memory needs of the heads.

    Raises:
        ModelLoadError: they do not fit this target; the message names the reason.
    """
    folder, reader, _, _ = _described(config, target)
    stored = open_head(folder, reader, config, target, lambda _: None)
    size = target.config.hidden_size
    return DrafterNeeds(weight_bytes=checkpoint_bytes(stored, target.dtype, target.device), width=size, shown=size)


def make(config: SpeculativeConfig, context: Context) -> Proposer:
    """Read the heads.

    Raises:
        ModelLoadError: they are not of this target; says why.
    """
    decoder, target = own_decoder(config, context), target_of(context)
    folder, reader, heads, blocks = _described(config, target)
    stored = open_head(folder, reader, config, target, lambda _: None)
    source = source_of(stored, config, {}, decoder.embedding.device)
    with batch_invariant(decoder.batch_invariant):
        made = Heads(decoder, source, _Names(stored), heads, blocks)
    stored.finish()
    if len(config.tree_widths) > heads:
        raise refuse(f"tree_widths has {len(config.tree_widths)} levels, the checkpoint {heads} heads")
    guesser = Guesser(
        decoder.config.vocab_size,
        None,
        coupled=config.draft_sample_method == "probabilistic",
        device=context.cache.storage.device,
    )
    medusa = Medusa(made, decoder, guesser, longest=target.max_model_len, widths=config.tree_widths)
    warm_up(medusa, context)
    return medusa


def _described(config: SpeculativeConfig, target: Target) -> tuple[Path, ConfigReader, int, int]:
    folder = drafter_folder("medusa", config.model, target.model, lambda _: None)
    reader, model = ConfigReader.load(folder), target.config
    for key, wanted in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if reader.integer(key, wanted) != wanted:
            raise reader.refuse(key, f"must be the target's ({wanted})")
    if reader.integer("truncated_vocab_size", model.vocab_size) != model.vocab_size:
        raise reader.refuse("truncated_vocab_size", f"must be vocab_size ({model.vocab_size})")
    heads = reader.integer("medusa_num_heads" if reader.has("medusa_num_heads") else "num_heads")
    if heads > MOST_HEADS:
        raise reader.refuse("medusa_num_heads", f"must be at most {MOST_HEADS}")
    key = "medusa_num_layers" if reader.has("medusa_num_layers") else "num_hidden_layers"
    return folder, reader, heads, reader.integer(key, 1)
