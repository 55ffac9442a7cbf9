"""A plan's orders for the tiers behind the device, and the worker's answers.

A *transfer* moves one block one step: between the device and a place in host memory (tier 0), or between such a place
and an outer tier, which finds blocks by their keys. The scheduler's manager gives out the places of host memory; the
worker never interprets a key. Transfers are asynchronous to steps, and each is answered exactly once.
"""

from typing import Final, Literal

import msgspec

from troupellm.protocol.config.kv_connectors import FailurePolicy

TransferKind = Literal["store", "load", "spill", "fetch", "reset"]
STORES: Final = 128
"""Blocks on their way from the device to host memory, at most."""


class BlockTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Move one block.

    store: device block to a place of host memory; it is read before the plan that says so writes anything, so the same
    plan may give the block away. load: the other way; the block may be read by plans after its `TransferDone`.
    spill: a place of host memory to the outer tier, under `key`; fetch: the other way. The place is not to be given
    away before the transfer is done. reset: no block moves; the outer tier forgets for good what was put there,
    what is under way with it is given up, and what is asked of it later waits.
    """

    transfer: int
    """Unique among those under way."""
    kind: TransferKind
    tier: int
    """0 with store and load; 1 and up are outer tiers, in the order of `WorkerReady.tiers`."""
    group: int
    """Cache group of the block, told for outer tiers that care."""
    block: int
    """Device block of a store or load; -1 of others."""
    place: int
    """Of host memory: 0 to `WorkerReady.host_slots` - 1; -1 of a reset."""
    key: bytes
    """Of the prefix that ends with the block, group included."""


class TierLookup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ask an outer tier how many of these keys it has, from the first on."""

    lookup: int
    tier: int
    keys: tuple[bytes, ...]


class TransferDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A transfer is over; nothing of it is read or written after this."""

    transfer: int
    ok: bool
    """False of a load or fetch: what lies in its target is void. A block that is not there, or not whole, is no error
    of the tier: it is a miss."""
    error: str = ""
    """Why not: miss, corrupt, cancelled, disabled, busy, or the error's text."""
    seconds: float = 0.0
    """The time of moving the block itself, without the wait for its turn."""


class LookupDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    lookup: int
    count: int
    """Of the keys asked for, how many are there, from the first on; 0 of a tier that is disabled."""


class TierReport(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """How a tier stands; told when anything of it has changed. Numbers that count something count since loading."""

    tier: int
    disabled: str = ""
    """Why it is left alone for now; empty: it works."""
    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    """0: not known."""
    evicted: int = 0
    """Blocks that gave way to others."""
    corrupt: int = 0
    """Blocks that were damaged or of another model, and were refused."""
    failed: int = 0
    """Operations that ended with an error or came too late."""
    disablings: int = 0
    refused: int = 0
    """Transfers for which the worker's queue had no room."""
    late: int = 0
    """Operations that ended after they were given up."""


class TierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An outer tier that the worker has."""

    name: str
    """disk, or a connector's name."""
    capacity_bytes: int = 0
    """0: not known."""
    loads: bool = True
    stores: bool = True
    failure_policy: FailurePolicy = "recompute"
    """The reaction to blocks that a lookup found and a load did not deliver."""
