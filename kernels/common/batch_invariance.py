"""A setting: weights that are packed inside it compute each row the same way in every batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Weights that are packed inside compute each row the same way, to the bit, in batches of any size."""
    token = _invariant.set(wanted)
    try:
        yield
    finally:
        _invariant.reset(token)


def batch_invariance() -> bool:
    """True inside `batch_invariant`."""
    return _invariant.get()
