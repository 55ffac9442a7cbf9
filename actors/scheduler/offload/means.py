"""The objects that all movers of blocks between tiers share, for as long as one worker lives."""

from typing import NamedTuple

from troupellm.actors.scheduler.block_tables import BlockTables
from troupellm.actors.scheduler.offload.cost import Cost
from troupellm.actors.scheduler.offload.counts import Counts
from troupellm.actors.scheduler.offload.host import HostTier
from troupellm.actors.scheduler.offload.traffic import Traffic


class Means(NamedTuple):
    host: HostTier
    traffic: Traffic
    tables: BlockTables
    cost: Cost
    counts: Counts
