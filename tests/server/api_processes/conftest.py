"""Tiny engines on real sockets."""

from troupellm.tests.support.engines.fixtures import anyio_backend, checkpoint, tiny_engine

__all__ = ["anyio_backend", "checkpoint", "tiny_engine"]
