"""Messages between a fleet and one of its engine processes: those of an API process, and the replica's own life."""

import msgspec

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.wire.api_process import (
    AdminAnswer,
    Admitted,
    ChargeAnswer,
    Chunks,
    Ended,
    FromApiProcess,
    Loading,
    MetricsText,
    Serving,
    Status,
    WireError,
)


class StartReplica(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to an engine process: load the model and serve."""

    config: EngineConfig
    server: ServerConfig
    """Without keys."""


class StopReplica(msgspec.Struct, frozen=True, tag=True):
    """End the requests that are left, and the process."""


class ReplicaFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served. The process ends."""

    error: WireError


ToReplica = StartReplica | StopReplica | FromApiProcess
FromReplica = (
    ReplicaFailed | Loading | Serving | Status | Admitted | Ended | Chunks | MetricsText | AdminAnswer | ChargeAnswer
)
