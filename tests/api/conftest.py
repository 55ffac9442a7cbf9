"""Tiny engines on real sockets."""

from engines import anyio_backend, builtin_engine, checkpoint, tiny_engine

__all__ = ["anyio_backend", "builtin_engine", "checkpoint", "tiny_engine"]
