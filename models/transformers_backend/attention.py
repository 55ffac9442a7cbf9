"""The attention function that models of `transformers` call: it passes every call to the runner of the model.

`transformers` looks attention up by name (its AttentionInterface). Ours has no state: the receiver of the calls is in a
context variable, so that engines in different threads of one process do not share it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional

from troupellm.kernels.paged_attention import paged_attention
from troupellm.kernels.rope_kv_write.kv_write import kv_write
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.protocol.errors import ModelLoadError

NAME = "troupellm_paged"
PROBE = "troupellm_probe"
"""The same attention, but with masks: used only to find the keys that a token of each layer sees."""
_SEEN = "troupellm_window"
"""Attribute of a probe's mask."""
FAR = 2**20
"""Tokens that a layer without a window sees."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention."""

    layer: int
    query: Tensor
    """[1, heads, tokens, head_dim]; keys and values alike, with their number of heads, values with their own size."""
    key: Tensor
    value: Tensor
    scale: float
    softcap: float
    window: int | None
    """The number of keys that a token sees, itself included; None is all."""
    sinks: Tensor | None
    """[heads], one more logit of each head's softmax."""


_answer: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("attention of the running model")


@contextmanager
def answering(answer: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """Within, models' attention is what `answer` returns: [tokens, heads, the values' size]."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def register() -> None:
    """Make the names known to `transformers`. May be done again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def _mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> Tensor:
    """As `transformers` calls it; a mask without numbers that says which window it is.

    Raises:
        ModelLoadError: it is neither plainly causal nor a sliding window.
    """

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    reach = local_size or FAR
    query = 2 * reach + 1
    if sees(query, query + 1):
        raise ModelLoadError("its attention looks ahead")
    if not (sees(query, query) and sees(query, query - reach + 1)) or (local_size and sees(query, query - reach)):
        raise ModelLoadError("its attention has a mask of its own")
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    setattr(mask, _SEEN, local_size)
    return mask


def _attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """As `transformers` calls it; unsupported arguments are refused by name."""
    if hasattr(attention_mask, _SEEN):
        sliding_window = getattr(attention_mask, _SEEN)
    elif attention_mask is not None or other.get("position_bias") is not None:
        raise ModelLoadError("its attention has a mask or a bias of its own")
    if other.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelLoadError("its attention looks ahead")
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", -1)),
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(softcap or 0.0),
        window=sliding_window,
        sinks=s_aux,
    )
    return _answer.get()(call)[None], None


class PagedAnswer:
    """Attention over the paged cache, for one batch."""

    def __init__(self, config: DecoderConfig, batch: ForwardBatch, caches: list[tuple[Tensor, Tensor]]) -> None:
        self._batch, self._caches = batch, caches
        self._view_of = cache_layout(config).view_of

    def __call__(self, call: AttentionCall) -> Tensor:
        """[tokens, heads, the values' size]."""
        group, cache = self._batch.groups[self._view_of[call.layer]], self._caches[call.layer]
        query, key, value = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))
        size = value.shape[-1]
        if size < key.shape[-1]:  # keys and values of the cache are equally long
            value = functional.pad(value, (0, key.shape[-1] - size))
        kv_write(key, value, *cache, group.kv_rows)
        sinks = None if call.sinks is None else call.sinks.float()
        query = query.contiguous()
        attended = paged_attention(query, *cache, group.plan, call.scale, softcap=call.softcap, sinks=sinks)
        return attended[..., :size]
