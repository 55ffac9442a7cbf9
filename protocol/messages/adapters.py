"""Adapters (LoRA) between the engine and its worker. An adapter is prepared beside the steps; plans name its digest.

A prepared adapter lies in the worker's host memory, checked and ready to be copied into a slot. A new worker has none.
"""

from typing import Literal

import msgspec

PREPARE_SECONDS = 120.0
"""An adapter that the worker has not prepared by then is given up."""


class AdapterSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter slot gets another content before the step computes."""

    slot: int
    """1 to `WorkerReady.max_loras`."""
    digest: str
    """Of an adapter that the worker has prepared."""


class AdapterRef(msgspec.Struct, frozen=True):
    """The adapter of a request, as it was when the request came."""

    name: str
    digest: str
    """SHA-256 of weights and configuration, in hex."""
    folder: str
    """Where the worker reads it."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may name."""

    name: str
    digest: str
    folder: str
    parent: str
    """The name of the model that it belongs to."""
    rank: int
    num_bytes: int
    """Of its weights, as they are stored."""

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.name, self.digest, self.folder)


class AdaptersServed(msgspec.Struct, frozen=True):
    """All that requests may name, by name."""

    adapters: tuple[AdapterInfo, ...]


class AdapterPreparation(msgspec.Struct, frozen=True, kw_only=True):
    """How the preparation of an adapter by the worker ended."""

    outcome: Literal["prepared", "refused", "late", "gone"]
    """prepared: plans may name the digest. refused: see `error`. late: it took too long. gone: there is no worker."""
    num_bytes: int = 0
    """Host memory that the adapter takes in the worker."""
    error: str = ""
    """One sentence for the owner of the adapter."""


NO_ADAPTERS = AdapterPreparation(outcome="refused", error="this worker serves no adapters")
ADAPTERS_GONE = AdapterPreparation(outcome="gone", error="there is no worker at the moment")
ADAPTERS_LATE = AdapterPreparation(outcome="late", error=f"the worker has not read it within {PREPARE_SECONDS:g} s")
