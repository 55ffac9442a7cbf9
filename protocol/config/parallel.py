"""Settings of an engine that is more than one process."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.config.setting_types import Count, Seconds, help_text as _help

MOST_REPLICAS = 64
MOST_RANKS = 64
RouterPolicy = Literal["kv", "least", "round-robin"]


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas: engines of one model behind one server. Ranks: processes of one engine that share a model."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=MOST_RANKS, description="processes that share each layer of the model")
    ] = 1
    distributed_timeout_seconds: Annotated[
        Seconds | None,
        _help("seconds that one of these processes waits for another; 0 is off (default: step_timeout)"),
    ] = None

    data_parallel_size: Annotated[
        int, Meta(ge=1, le=MOST_REPLICAS, description="engine processes behind the server, each with the whole model")
    ] = 1
    data_parallel_rank: Annotated[
        int, Meta(ge=0, lt=MOST_REPLICAS, description="number of this engine, the label `engine` of its metrics")
    ] = 0
    data_parallel_router: Annotated[
        RouterPolicy,
        _help("how a replica is chosen: kv by the prefix it holds and by its work, least by its work alone"),
    ] = "kv"
    failover_limit: Annotated[
        Count, _help("how often a request moves to another replica because its own died, before it fails")
    ] = 3
