"""Checks that the package `transformers` is installed, without importing it."""

from importlib.util import find_spec

INSTALL = 'pip install -e ".[transformers]" in a clone of troupellm'


def has_transformers() -> bool:
    """True if the package is installed; it is not imported."""
    return find_spec("transformers") is not None
