"""Real engines of the tiny model."""

from engines import anyio_backend, checkpoint, tiny_engine

__all__ = ["anyio_backend", "checkpoint", "tiny_engine"]
