"""Turns panics of Rust libraries into errors.

They come as exceptions that are no `Exception`: what answers one request's failure would let them by, and the whole
engine would end with the text that a library cannot take.
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
