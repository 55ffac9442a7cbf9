"""Builds the transfer engine from a worker's offload settings."""

from pathlib import Path

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.kv_connectors.open_connectors import open_connectors
from troupellm.models.kv_offload.block_copy import BlockMover, MemoryMover, bytes_of_block
from troupellm.models.kv_offload.block_format import HEADER_BYTES
from troupellm.models.kv_offload.disk_store import DiskStore
from troupellm.models.kv_offload.host_memory import HostBuffer, host_slots, memory_left
from troupellm.models.kv_offload.store import BlockStore, StoreContext
from troupellm.models.kv_offload.transfers import TransferEngine
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError


def open_offload(config: EngineConfig, cache: KVCache, fingerprint: str, *, num_blocks: int) -> TransferEngine | None:
    """Take the host tier's memory, open the outer tiers and start their threads; None where none is asked for.

    Args:
        fingerprint: 64 hexadecimal digits, of the model and its blocks' layout; empty where none outlives the engine.
        num_blocks: that plans may name.

    Raises:
        ConfigError: a tier is too small, or the machine is.
    """
    places = host_slots(config, bytes_of_block(cache))
    if not places:
        return None
    timeout = config.offload.kv_offload_timeout
    context = StoreContext(bytes.fromhex(fingerprint) or bytes(32), bytes_of_block(cache), timeout)
    memory_left(config)  # on a GPU the size has not been checked yet
    host_buffer = HostBuffer(places, context.block_bytes, pinned=cache.storage.is_cuda)
    mover = make_mover(cache, host_buffer)
    stores = open_stores(config, context)  # last, since they hold ports and threads and the steps before may fail
    return TransferEngine(mover, host_buffer, stores, num_blocks=num_blocks, timeout=timeout)


def make_mover(cache: KVCache, host_buffer: HostBuffer) -> BlockMover:
    """The mover that copies blocks of that cache."""
    if not cache.storage.is_cuda:
        return MemoryMover(cache, host_buffer)
    from troupellm.models.kv_offload.gpu_mover import CudaMover

    return CudaMover(cache, host_buffer)


def open_stores(config: EngineConfig, context: StoreContext) -> list[BlockStore]:
    """The outer tiers, nearest first: tiers 1, 2 and so on.

    Raises:
        ConfigError: one cannot be opened with its settings.
    """
    stores: list[BlockStore] = []
    offload = config.offload
    if offload.kv_offload_disk_path is not None:
        size = HEADER_BYTES + context.block_bytes
        if offload.kv_offload_disk_bytes < size:
            raise ConfigError(
                f"kv_offload_disk_bytes: {offload.kv_offload_disk_bytes} bytes do not hold one KV block of {size}",
                param="kv_offload_disk_bytes",
            )
        stores.append(
            DiskStore(Path(offload.kv_offload_disk_path).expanduser(), context, offload.kv_offload_disk_bytes)
        )
    try:
        return [*stores, *open_connectors(config, context)]
    except BaseException:
        for store in stores:
            store.close()
        raise
