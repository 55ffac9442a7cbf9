"""The built-in tokenizer, and grammars built for it."""

from tests.models.structured_outputs.conftest import (
    anyio_backend,
    builtin_engine,
    checkpoint,
    helper,
    library,
    tiny_engine,
    tokenizer,
)

__all__ = ["anyio_backend", "builtin_engine", "checkpoint", "helper", "library", "tiny_engine", "tokenizer"]
