"""Hints of clients about the KV cache: which prefixes they will come back for, and for how long.

A hint never changes an answer. It biases which blocks are evicted first.
"""

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from troupellm.protocol.config.setting_types import Seconds, help_text as _help

MAX_CACHE_MARKS: Final = 4
"""Blocks with `cache_control` in one request."""
TTL_SECONDS: Final = {"5m": 300.0, "1h": 3600.0}
"""The values of `cache_control.ttl`, in seconds."""
RETENTION_SECONDS: Final = {"24h": 3600.0}
"""Seconds that `prompt_cache_retention` leases a prompt for; other values lease none."""
PREFETCH_OUTCOMES: Final = ("present", "loaded", "missing", "no_room", "failed")
LEASE_ENDS: Final = ("expired", "evicted", "replaced", "share", "deleted", "reset")


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of KV blocks."""

    kv_lease_fraction: Annotated[
        float, Meta(ge=0.0, le=1.0, description="share of the KV blocks that leases may cover, by all keys; 0 is off")
    ] = 0.5
    tool_lease: Annotated[
        Seconds, _help("seconds for which a session's turn that ended in tool calls keeps its KV blocks; 0 is off")
    ] = 60.0


DEFAULT_LEASES: Final = LeaseConfig()


class PrefixLease(msgspec.Struct, frozen=True, array_like=True):
    """The first tokens of a prompt are to be kept for so long after their last use."""

    tokens: int
    seconds: float


class CacheMark(msgspec.Struct, frozen=True, array_like=True):
    """A place in a chat up to which its prompt is leased."""

    text: str
    """The last characters before the place, as the chat template renders them; empty: the end of the prompt."""
    seconds: float


class KVHints(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request. The marks of a chat are in its `ChatPrompt`."""

    session: str = ""
    """The session that the request belongs to, among those of its tenant; empty: none."""
    retain: float = 0.0
    """Seconds for which the whole prompt is leased."""
    replica: int | None = None
    """The replica that is to compute it; None: the fleet chooses."""


NO_HINTS: Final = KVHints()


class PrefetchReport(msgspec.Struct, frozen=True):
    """Blocks of a session's turns, by where they were found."""

    present: int = 0
    """On the device already."""
    loading: int = 0
    """On their way from a tier, or asked for there."""
    missing: int = 0
    no_room: int = 0
    """Left in their tier: the free and unleased blocks of the device did not suffice."""


class KeepTurn(msgspec.Struct, frozen=True):
    """A turn of a session has ended in tool calls: its blocks are leased until the results come."""

    tenant: str
    session: str


class PrefetchSession(msgspec.Struct, frozen=True):
    """Bring a session's blocks to the device."""

    tenant: str
    session: str
    done: Callable[[PrefetchReport | None], None]
    """Called once; None: the tenant has no such session."""


class DropSession(msgspec.Struct, frozen=True):
    """The session is over: the blocks that are its own are evicted first."""

    tenant: str
    session: str
    done: Callable[[int | None], None]
    """Called once with the number of those blocks; None: the tenant has no such session."""


KVHintMessage = KeepTurn | PrefetchSession | DropSession
