"""The tensors of one step, read by every layer."""

from dataclasses import dataclass

from torch import Tensor

from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.short_conv.spans import ConvSpans
from troupellm.models.adapters.batch import AdapterBatch


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """The tensors that the layers of one view of the KV cache read, see `models.cache_layout`."""

    kv_rows: Tensor
    """int64 [tokens * kv_heads]: the cache rows that keys and values are written to, see `kernels.kv_write`."""
    plan: Plan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A flat batch of tokens: the spans of all rows, one after the other."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    groups: tuple[GroupBatch, ...]
    """Per view of the KV cache; a layer reads `groups[cache_layout(config).view_of[layer]]`."""
    logit_tokens: Tensor | None
    """int64 [logits]: which tokens the head is computed for; None is all."""
    inputs: tuple[Tensor, Tensor] | None = None
    """Places int64 [n] of the batch whose token embeddings give way to others [n, hidden]; None is nowhere."""
    angles: Tensor | None = None
    """[tokens, width], rows of `Decoder.angle_table` at the positions, where they have been looked up already."""
    adapters: AdapterBatch | None = None
    """None where every row computes with the base model."""

    states: ConvSpans | None = None
    """The rows and their state slots; None where the model has no states."""
    reading: tuple[GroupBatch, ...] | None = None
    """As `groups`, of the tokens `logit_tokens` alone: for layers behind the last one that writes keys and values. None
    where there is no such layer, or no other token."""
    layer_inputs: Tensor | None = None
    """[rows, layers, size], of a model whose layers have inputs of their own."""
    query_factors: Tensor | None = None
    """[tokens, 1], by which queries are multiplied, where the model's queries grow with their positions."""

    def with_logits(self, hidden: Tensor) -> Tensor:
        """Select from all tokens' hidden states [tokens, hidden] those that the head is computed for."""
        return hidden if self.logit_tokens is None else hidden[self.logit_tokens]
