"""Which part of an answer a running request gives at a time, with vLLM's names and numbers."""

from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    """The whole answer so far."""
    DELTA = 1
    """The part that is new since the last output."""
    FINAL_ONLY = 2
    """One output, at the end."""
