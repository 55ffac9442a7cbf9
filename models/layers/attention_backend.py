"""Chooses the attention back end of a model."""

from dataclasses import replace

import msgspec
import torch

from troupellm.kernels.paged_attention.backends import Needs, Planner, choose
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.cache_layout import cache_layout

CPU = torch.device("cpu")


def plan_attention(
    config: DecoderConfig,
    block_size: int,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
    device: torch.device = CPU,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Planner:
    """Choose the back end and return the planner that prepares each step of this model for it.

    Args:
        dtype: of the model, and of the cache unless `kv_dtype` says otherwise.
        backend: a name; auto takes the first back end that supports the model.

    Raises:
        ConfigError: the back end is unknown or does not support the model; `param` is attention_backend.
    """
    shape, *others = dict.fromkeys(view.heads for view in cache_layout(config).views)
    needs = Needs(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        softcap=config.attention_softcap > 0,
        sinks=any(layer.sinks for layer in config.layers),
        latent=0 if config.mla is None else config.mla.latent,
        batch_invariant=batch_invariant,
    )
    more = [replace(needs, **msgspec.structs.asdict(heads)) for heads in others]
    return Planner(choose(needs, backend, *more), needs)
