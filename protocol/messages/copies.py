"""Copies within the worker's memory that a plan makes before it computes."""

from typing import Final

import msgspec

NO_STATE: Final = -1
"""As the source of a `StateCopy`: the state before the first token."""


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy one block's content before the step computes (copy-on-write of forks)."""

    group: int
    source: int
    target: int


class StateCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy one slot's state, of all layers that have one."""

    source: int
    """NO_STATE begins anew."""
    target: int
