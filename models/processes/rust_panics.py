"""Turns panics of Rust libraries into errors.

A panic is no subclass of `Exception`. The handlers of one request's failure would not catch it, so one bad text would
end the whole engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "PanicException"
"""Each library has a class of its own, which none lets be imported."""


@contextmanager
def no_panics(library: str) -> Iterator[None]:
    """
    Args:
        library: for the message.

    Raises:
        RuntimeError: the library panicked inside the block; it can be called again.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _NAME:
            raise
        raise RuntimeError(f"the library {library} panicked: {error}") from error
