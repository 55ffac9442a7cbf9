"""Adapters (LoRA) between the engine and its worker. An adapter is prepared beside the steps; plans name its digest.

A prepared adapter lies in the worker's host memory, checked and ready to be copied into a slot. A new worker has none.
"""

from typing import Literal

import msgspec

PREPARE_SECONDS = 120.0
"""An adapter that the worker has not prepared by then is given up."""


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
