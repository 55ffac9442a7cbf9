"""Parts of the snapshot."""

from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.protocol.messages.cache_groups import group_name
from troupellm.protocol.messages.snapshot import CacheGroupSnapshot
from troupellm.protocol.messages.worker import CacheGroup


def show_groups(groups: tuple[CacheGroup, ...], pool: BlockPool) -> tuple[CacheGroupSnapshot, ...]:
    """How the pool's blocks are shared among cache groups."""
    counted = zip(groups, pool.used_by, pool.cached_by, strict=True)
    return tuple(
        CacheGroupSnapshot(name=group_name(index, group), used=used, cached=cached)
        for index, (group, used, cached) in enumerate(counted)
    )
