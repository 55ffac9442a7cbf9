"""The section of the KV cache."""

from typing import Annotated, Literal

import msgspec

from troupellm.protocol.config.setting_types import Count, EventDetail, Fraction, PositiveInt, help_text as _help


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[PositiveInt, _help("tokens per KV block")] = 16
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None, _help("KV cache size, such as 4GiB (default: on a CPU half of what is free, up to 4GiB)")
    ] = None
    gpu_memory_utilization: Annotated[
        Fraction, _help("share of a GPU's memory to use, when kv_cache_memory_bytes is not given")
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8", "fp8_e4m3"],
        _help("what keys and values are kept in; int8: with a scale per token and head; auto: the model's dtype"),
    ] = "auto"
    num_gpu_blocks_override: Annotated[PositiveInt | None, _help("exact number of KV blocks")] = None
    enable_prefix_caching: Annotated[bool, _help("reuse KV blocks of equal prompt prefixes")] = True
    prefix_hash_secret_file: Annotated[str | None, _help("secret that names KV blocks; made if missing")] = None
    kv_events: Annotated[
        EventDetail, _help("tell routers which KV blocks can be found; tokens: with their token ids, which users wrote")
    ] = "off"
    kv_events_buffer: Annotated[PositiveInt, _help("events that are kept for readers who are behind")] = 10_000
    disable_hybrid_kv_cache_manager: Annotated[
        bool, _help("keep the KV blocks behind sliding windows: all layers share one block table")
    ] = False
    max_state_snapshots_bytes: Annotated[
        Count | None,
        _help("of models with states: memory for those of prefixes, such as 1GiB (default: a tenth of the KV cache's)"),
    ] = None
