"""The objects that all movers of blocks between tiers share, for as long as one worker lives."""

from typing import NamedTuple

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.kv_offload.cost import Cost
from troupellm.actors.kv_offload.host_slots import HostTier
from troupellm.actors.kv_offload.stats import Counts
from troupellm.actors.kv_offload.transfers import Transfers


class OffloadContext(NamedTuple):
    host: HostTier
    transfers: Transfers
    tables: BlockTables
    cost: Cost
    counts: Counts
