"""Changes of the findable KV blocks, for routers that send requests to the engine with their prefix.

Events are numbered from 1 on without a gap. A slow or late reader gets the number of missed events. A
snapshot lists the blocks that can be found now, so such a reader can catch up.
"""

from typing import Literal

import msgspec

Medium = Literal["device", "host"]


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", tag_field="event"):
    """A block can be found."""

    seq: int
    medium: Medium
    group: int
    """Cache group: a prefix is found when each group has what the tokens behind it see."""
    key: str
    """Name of the block and of all tokens before it, in hexadecimal; equal between engines that share a secret and
    serve the same model."""
    parent: str
    """Key of the prefix before it; empty where it is not told again, because the block is known from the device."""
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    """The block's own; told only with --kv-events tokens, because they are what users wrote."""
    lora_name: str = ""
    """The LoRA adapter that computed it; empty is the model itself, or as with `parent` a block that is told again."""


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed", tag_field="event"):
    """A block cannot be found there any more."""

    seq: int
    medium: Medium
    group: int
    key: str


class BlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared", tag_field="event"):
    """Nothing can be found there any more."""

    seq: int
    medium: Medium


class EventsLost(msgspec.Struct, frozen=True, kw_only=True, tag="gap", tag_field="event"):
    """Events up to this number are not kept any more, and were not told to this reader."""

    seq: int
    dropped: int


class SnapshotBegins(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot", tag_field="event"):
    """Forget what was told before: `stored` events follow for what can be found, with the numbers that they had, up to
    this number; then the events behind it."""

    seq: int
    blocks: int
    """As many follow, less what cannot be found any more when its turn comes."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared | EventsLost | SnapshotBegins
MOST_READ = 1024
"""Events in one answer."""


class KVEventsRead(msgspec.Struct, frozen=True, kw_only=True):
    """Events, oldest first."""

    events: tuple[KVEvent, ...]
    last: int
    """Number of the last one of them, or of the last one that is known already; behind it the next reading begins."""
    snapshot: int | None = None
    """More of a snapshot follows, which was begun at this number."""
    ended: bool = False
    """There will be no more."""
